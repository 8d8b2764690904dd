"""The site: `bash launchers/docs.sh` builds it, offline, and a warning is an error."""

from asyncrl import __version__

project = "asyncrl"
author = "the asyncrl authors"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "asyncrl"
html_show_sphinx = False
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True, "exclude-members": "__init__, __new__"}
# Pages link to files of the repository, which are no pages. tests/test_docs.py checks that files and headings exist.
suppress_warnings = ["myst.xref_missing"]
