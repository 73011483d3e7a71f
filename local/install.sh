#!/bin/sh
# Makes .venv contain exactly the packages of the two locks (to run and to develop), and this project in editable form.
# Needs no root. If uv is missing, it is installed into a private environment below .tideline.
set -eu
cd "$(dirname "$0")/.."

refuse() {
    echo "tideline: $*" >&2
    exit 1
}

supported() {
    command -v "$1" >/dev/null 2>&1 &&
        "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

find_python() {
    for python in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if supported "$python"; then
            command -v "$python"
            return
        fi
    done
    found=$(python3 --version 2>/dev/null || echo "no python3")
    refuse "Python 3.11, 3.12 or 3.13 is needed, found ${PYTHON:-$found}: install one and name it, e.g. make install PYTHON=python3.11"
}

find_uv() {
    if command -v uv >/dev/null 2>&1; then
        command -v uv
        return
    fi
    private=.tideline/uv
    if [ ! -x "$private/bin/uv" ]; then
        echo "tideline: fetching uv into $private" >&2
        "$1" -c 'import ensurepip, venv' 2>/dev/null ||
            refuse "$1 has no venv module: install it (Debian/Ubuntu: apt-get install python3-venv), or install uv"
        rm -rf "$private"
        "$1" -m venv "$private" && "$private/bin/pip" install --quiet --disable-pip-version-check uv >&2 ||
            refuse "uv could not be fetched: check the network (pip's own settings apply), or install uv yourself"
    fi
    echo "$private/bin/uv"
}

python=$(find_python)
uv=$(find_uv "$python")
supported .venv/bin/python || "$uv" venv --quiet --clear --python "$python" .venv
echo "tideline: installing into .venv (about 1.3 GB the first time)" >&2
# Python files are compiled once here. Otherwise, if Python may not write its cache, every process compiles its imports.
"$uv" pip sync --quiet --compile-bytecode --python .venv/bin/python --require-hashes \
    requirements.lock requirements-dev.lock
"$uv" pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --editable .
