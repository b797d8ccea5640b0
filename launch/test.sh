#!/usr/bin/env bash
# Makes or reuses .venv, installs the package, runs the tests. Arguments go to pytest:
#
#   bash launch/test.sh                      everything, two processes
#   bash launch/test.sh tests/unit -k pack   some
#
# PYTHON names the interpreter for .venv (default: python3).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/install.sh
source "$root/launch/install.sh"
install_tdp "$root"

# Ranks are forked from the test process: one thread each, or the cores are fought over.
export OMP_NUM_THREADS=1
if (($# == 0)); then
    set -- -q -n 2 --dist worksteal
fi
cd "$root"
exec "$VENV_BIN/python" -m pytest "$@"
