#!/bin/sh
# Looks for what the build needs and names all that is missing at once.
set -u
missing=""
need() { missing="$missing
  - $1"; }

if ! command -v cargo >/dev/null 2>&1; then
    need "cargo 1.95 or newer: https://rustup.rs, then 'rustup default stable'"
else
    minor=$(cargo --version | sed -n 's/^cargo 1\.\([0-9]*\).*/\1/p')
    [ "${minor:-0}" -ge 95 ] || need "cargo 1.95 or newer (this is $(cargo --version | cut -d' ' -f2)): 'rustup update stable'"
fi
command -v "${CC:-cc}" >/dev/null 2>&1 || need "a C compiler: 'apt install gcc' (Debian), 'dnf install gcc' (Fedora)"
if ! command -v "${PYTHON:-python3}" >/dev/null 2>&1; then
    need "python 3.11 or newer: 'apt install python3 python3-venv'"
elif ! "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    need "python 3.11 or newer (this is $("${PYTHON:-python3}" --version | cut -d' ' -f2)): or 'make PYTHON=python3.12 ...'"
elif ! "${PYTHON:-python3}" -c 'import venv, ensurepip' 2>/dev/null; then
    need "python's venv: 'apt install python3-venv'"
fi
[ -z "$missing" ] && exit 0
echo "Mission Control cannot be built yet. Missing:$missing" >&2
exit 3
