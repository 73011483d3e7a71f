#!/bin/sh
# Makes .venv contain exactly the packages of the two locks (to run and to develop), and this project in editable form.
# Needs no root. If uv is missing, it is installed into a private environment below .tideline.
set -eu
cd "$(dirname "$0")/.."
. local/step.sh

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

# Sets the variable `uv`. It is not called as $(find_uv), since a step in a subshell could not end in order at Ctrl-C.
find_uv() {
    private=.tideline/uv
    uv=$(command -v uv) || uv=$private/bin/uv
    [ ! -x "$uv" ] || return 0
    "$1" -c 'import ensurepip, venv' 2>/dev/null ||
        refuse "$1 has no venv module: install it (Debian/Ubuntu: apt-get install python3-venv), or install uv"
    step "fetching uv into $private" "about 5 s on a fast line" fetch_uv "$1" ||
        refuse "uv could not be fetched: check the network (pip's own settings apply), or install uv yourself"
}

fetch_uv() {
    rm -rf "$private" && "$1" -m venv "$private" &&
        "$private/bin/pip" install --quiet --disable-pip-version-check uv
}

# Python files are compiled once here. Otherwise, if Python may not write its cache, every process compiles its imports.
sync_packages() {
    "$uv" pip sync --quiet --compile-bytecode --python .venv/bin/python --require-hashes \
        requirements.lock requirements-dev.lock
}

python=$(find_python)
find_uv "$python"
supported .venv/bin/python || "$uv" venv --quiet --clear --python "$python" .venv
step "installing up to 1.3 GB into .venv" "the first time about 40 s on a fast line" sync_packages
"$uv" pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --editable .
