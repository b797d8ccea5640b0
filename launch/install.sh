# shellcheck shell=bash
# Sourced by the other scripts: a virtual environment with the package in it.
#
#   install_tdp ROOT    makes or reuses ROOT/.venv, installs what changed, and sets VENV_BIN
#
# PYTHON names the interpreter to make it with (default: python3).

_install_stamp() {
    # An editable install knows the modules and the native code it was made with; their change asks for another.
    local root=$1
    {
        printf '%s\n' "$root"
        "$root/.venv/bin/python" --version
        cat "$root/pyproject.toml" "$root/constraints.txt"
        find "$root/csrc" -type f | LC_ALL=C sort | while IFS= read -r file; do cat "$file"; done
        find "$root/tdp_megatron" -name '*.py' | LC_ALL=C sort
    } | cksum
}

_check_machine() {
    local python=$1 compiler=${CXX:-c++}
    if ! command -v "$python" >/dev/null; then
        echo "error: there is no '$python'; install Python 3.10 or newer, or set PYTHON" >&2
        return 1
    fi
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "error: $("$python" --version) is too old; set PYTHON to Python 3.10 or newer" >&2
        return 1
    fi
    # shellcheck disable=SC2086  # CXX may hold a launcher, as in "ccache g++"
    if ! command -v ${compiler%% *} >/dev/null; then
        echo "error: there is no C++ compiler; install g++ or clang, or set CXX" >&2
        return 1
    fi
}

install_tdp() {
    local root=$1 python=${PYTHON:-python3}
    local stamp_file=$root/.venv/tdp-installed
    VENV_BIN=$root/.venv/bin
    if ! "$VENV_BIN/python" -m pip --version >/dev/null 2>&1; then
        _check_machine "$python" || return
        echo "making $root/.venv with $("$python" --version)"
        "$python" -m venv --clear "$root/.venv" || return
    fi
    if [[ -f $stamp_file && $(<"$stamp_file") == "$(_install_stamp "$root")" ]]; then
        return 0
    fi
    _check_machine "$VENV_BIN/python" || return
    echo "installing into $root/.venv (minutes the first time, torch is large)"
    rm -f "$stamp_file"
    local pip=("$VENV_BIN/python" -m pip install -qq --disable-pip-version-check -c "$root/constraints.txt")
    "${pip[@]}" scikit-build-core pybind11 cmake ninja || return
    (cd "$root" && "${pip[@]}" --no-build-isolation -e ".[test]" -C build-dir=build) || return
    _install_stamp "$root" >"$stamp_file"
}
