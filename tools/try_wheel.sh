#!/bin/sh
# Tests a wheel in an empty environment, without a checkout: doctor, and two steps of the demo.
# usage: tools/try_wheel.sh WHEEL
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
wheel=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cp -R "$root/demo" "$place/demo"
cd "$place"
python -m venv empty
programs=empty/bin
[ -d "$programs" ] || programs=empty/Scripts
"$programs/python" -m pip install --quiet --disable-pip-version-check "$wheel"
unset PYTHONPATH
"$programs/qlora-wgpu" doctor --quick
"$programs/qlora-wgpu" train demo/demo.yaml train.max_steps=2 output.dir=run
test -f run/adapter/adapter_model.safetensors
