#!/bin/sh
# Creates .venv with this project, and makes sure that there is a GPU with Vulkan.
# usage: tools/setup.sh [pip extras, such as dev]
set -eu
cd "$(dirname "$0")/.."
extras=${1:-}

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null 2>&1; then
        sudo "$@"
    else
        echo "error: '$*' requires root: run it as root, or install sudo" >&2
        exit 2
    fi
}

apt_install() {
    if ! command -v apt-get >/dev/null 2>&1; then
        echo "error: install with your system's package manager: $*" >&2
        exit 2
    fi
    as_root apt-get update -qq
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

pip_install() {
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# The system's Python may be older than another one.
python=
for name in python3.11 python3 python3.12 python3.13 python3.14; do
    if command -v "$name" >/dev/null 2>&1 && new_enough "$name"; then
        python=$name
        break
    fi
done
if [ -z "$python" ] && ! command -v python3 >/dev/null 2>&1; then
    apt_install python3 python3-venv
    python=python3
fi
if [ -z "$python" ] || ! new_enough "$python"; then
    echo "error: Python 3.11 or later is required, found $(python3 --version)" >&2
    exit 2
fi

# A virtual environment contains its path: it is created again if the folder was moved or copied.
here=$(pwd -P)
if [ ! -x .venv/bin/python ] || [ "$(cat .venv/.made-in 2>/dev/null || echo "$here")" != "$here" ]; then
    # Debian's python3 lacks parts of venv.
    "$python" -c 'import ensurepip, venv' 2>/dev/null || apt_install python3-venv
    "$python" -m venv --clear .venv
    echo "$here" >.venv/.made-in
fi
stamp=.venv/.installed-${extras:-plain}
if [ ! -f "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
    echo "installing qlora-wgpu into .venv"
    what=".${extras:+[$extras]}"
    pip_install --no-compile uv || true
    # uv takes seconds where pip takes a minute, but does not know of indexes that pip is told of.
    .venv/bin/uv pip install --quiet --python .venv/bin/python -e "$what" || pip_install -e "$what"
    touch "$stamp"
fi

# doctor fails if there is no usable GPU; the WebGPU library itself may lack libvulkan.
if ! .venv/bin/qlora-wgpu doctor --quick >/dev/null 2>&1; then
    echo "no GPU with Vulkan found: installing lavapipe (mesa-vulkan-drivers)"
    apt_install mesa-vulkan-drivers libvulkan1
    .venv/bin/qlora-wgpu doctor --quick >/dev/null  # reports on stderr what is missing
fi

# The tests compile kernels with RADV, the driver for AMD's GPUs, on any machine.
if [ "$extras" = dev ] && [ "$(uname)" = Linux ] && ! ls /usr/share/vulkan/icd.d/radeon_icd*.json >/dev/null 2>&1; then
    echo "RADV not found: installing it (mesa-vulkan-drivers)"
    apt_install mesa-vulkan-drivers libvulkan1
fi
