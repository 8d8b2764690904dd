#!/usr/bin/env bash
# Builds the documentation as a site: docs/_build/html/index.html. Needs no network once installed; warnings are errors.
#
#   bash launchers/docs.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launchers/install.sh
asyncrl_install "[docs]"
"$PYTHON" -m sphinx -W --keep-going -q -b html docs docs/_build/html
echo "docs/_build/html/index.html"
