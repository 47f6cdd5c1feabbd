#!/bin/sh
# Writes constraints/VERSION.txt: for each version of Python, the versions of all dependencies of the
# project and its extras, for every system. CI and the image install these.
# usage: tools/constraints.sh [VERSION ...]
set -eu
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- 3.11 3.12 3.13 3.14
for python in "$@"; do
    .venv/bin/uv pip compile --quiet --universal --all-extras --python-version "$python" \
        --no-annotate --custom-compile-command tools/constraints.sh \
        --output-file "constraints/$python.txt" pyproject.toml
done
