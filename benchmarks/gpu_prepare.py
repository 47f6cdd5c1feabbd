"""Gathers what a GPU machine without a network needs for benchmarks/gpu.py, in one folder.

usage: python benchmarks/gpu_prepare.py FOLDER [--python 3.12] [--cuda 130] [--there FILE]
           [--debs] [--unsloth] [--mib 64]

Run it in the repository's root, with a network, and pip and build in this Python. FOLDER gets
wheels: this project, built now; wgpu and wgpudawn; peft; bitsandbytes with the library of one CUDA
version (130: what torch 2.11 is built for) alone, which takes 4 MiB instead of 60; and what they
need that the machine lacks. FILE lists what it has, a package a line, as pip freeze does; torch,
transformers and NumPy are taken to be there in any case. With --debs the Vulkan loader comes along,
by apt-get. With --unsloth Unsloth does, too, without its application (2 of 27 MiB), and what
training imports of what it needs: not xformers, torchao, cut-cross-entropy or diffusers, without
which it takes torch's attention and its own loss. What to run there is printed, and kept in
FOLDER/RUN.txt.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED = ("wgpu", "wgpudawn", "pytest", "pytest-xdist", "psutil")
BESIDE_TORCH = ("peft", "bitsandbytes", "accelerate")  # what they need is with torch
UNSLOTH = ("unsloth", "unsloth_zoo")
# What they import at once, by who names the versions.
UNSLOTH_NEEDS = {"unsloth_zoo": ("trl", "datasets"), "datasets": ("dill", "multiprocess")}
# Packages of the machine's own, however it names their versions.
THERE = ("torch", "transformers", "numpy")
DEBS = ("libvulkan1", "libegl1", "libglvnd0", "libopengl0", "libgl1", "libglx0", "libgles2")
TARGETS = tuple(f"manylinux_2_{n}_x86_64" for n in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5))
RUN = """\
In the repository's root, with FOLDER = {folder}:

  . {folder}/setup.sh
  python3 benchmarks/gpu.py RESULTS --call 1 --archive RESULTS.tar.gz

and --call 2 and --call 3 after it, each within {minutes} minutes; the same call again goes on with
what is left. On another machine RESULTS.tar.gz brings along what is done. Bring it back.
"""
SETUP = """\
# Sourced by a shell: installs the wheels beside it and finds the driver.
here=$(dirname "${{BASH_SOURCE:-{folder}/setup.sh}}")  # there it may be anywhere
site=${{TMPDIR:-/tmp}}/qlora-wgpu-site-$(cat "$here"/*.whl | cksum | cut -d " " -f 1)
if [ ! -e "$site/whole" ]; then
    rm -rf "$site"
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir \\
        --target "$site" "$here"/*.whl && touch "$site/whole" || return 1
fi
export PYTHONPATH="$site${{PYTHONPATH:+:$PYTHONPATH}}"
if ! ldconfig -p | grep -q libvulkan.so.1; then
    for deb in "$here"/*.deb; do [ -e "$deb" ] && dpkg -x "$deb" /; done
    ldconfig
fi
eval "$(python3 benchmarks/gpu_driver.py)"
"""


def pip(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
        stdout=subprocess.PIPE, check=False, encoding="utf-8",
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"pip {' '.join(arguments[:3])} … failed")
    return done.stdout


def target(python: str) -> list[str]:
    """pip's options for the machine."""
    platforms = [option for name in TARGETS for option in ("--platform", name)]
    return ["--python-version", python, "--implementation", "cp", "--only-binary=:all:", *platforms]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def present(file: Path | None) -> set[str]:
    lines = file.read_text(encoding="utf-8").split() if file else []
    names = {normal(re.split(r"[=<>@ ;\[]", line)[0]) for line in lines}
    return names | set(THERE)


def build_own(folder: Path) -> Path:
    """This project's wheel, whose metadata commands ask for their version."""
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(folder), str(ROOT)],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return next(folder.glob("qlora_wgpu-*.whl"))


def lacking(own: Path, python: str, there: set[str]) -> list[str]:
    """Names and versions of all that is needed and not there."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        pip("install", "-q", "--dry-run", "--ignore-installed", "--target", "none",
            "--report", report.name, *target(python), str(own), *NEEDED)  # fmt: skip
        installs = json.loads(Path(report.name).read_text(encoding="utf-8"))["install"]
    chosen = {normal(i["metadata"]["name"]): i["metadata"]["version"] for i in installs}
    pinned = [f"{n}=={version}" for n, version in sorted(chosen.items()) if n not in there]
    beside = [name for name in BESIDE_TORCH if name not in there]
    return [each for each in pinned if not each.startswith("qlora-wgpu==")] + beside


def requirements(wheel: Path, names: tuple[str, ...]) -> list[str]:
    """What a wheel asks of some packages, with versions."""
    with zipfile.ZipFile(wheel) as packed:
        file = next(name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        lines = packed.read(file).decode().splitlines()
    asked = []
    for line in (line for line in lines if line.startswith("Requires-Dist:")):
        text, _, condition = line.removeprefix("Requires-Dist:").partition(";")
        if "extra" not in condition and normal(re.split(r"[^\w.-]", text.strip())[0]) in names:
            asked.append("".join(text.split()))
    return asked


def gather_unsloth(folder: Path, python: str, there: set[str]) -> None:
    """Unsloth and what the machine lacks for it, in the versions that it takes."""

    def download(wanted: list[str]) -> None:
        if wanted:
            pip("download", "-q", "--no-deps", "-d", str(folder), *target(python), *wanted)

    download(list(UNSLOTH))
    for name, needs in UNSLOTH_NEEDS.items():
        for wheel in folder.glob(f"{name}-*.whl"):
            download(requirements(wheel, tuple(need for need in needs if need not in there)))
    for wheel in folder.glob("unsloth-*.whl"):
        thin(wheel, lambda name: name.startswith(("unsloth/", "unsloth-")))


def keep_one_cuda(wheel: Path, cuda: str) -> None:
    """Leaves a wheel of bitsandbytes the CUDA library of one version."""
    library = f"libbitsandbytes_cuda{cuda}.so"
    names = zipfile.ZipFile(wheel).namelist()
    if not any(name.endswith(library) for name in names):
        has = sorted(re.findall(r"_cuda(\d+)\.so", " ".join(names)))
        raise SystemExit(f"{wheel.name} has no CUDA {cuda}, only {', '.join(has)}: give --cuda")
    left = (library, "_cpu.so")
    thin(wheel, lambda name: not name.endswith((".so", ".dll")) or name.endswith(left))


def thin(wheel: Path, keep: Callable[[str], bool]) -> None:
    """Leaves a wheel some of its files, and its record right."""
    slim = wheel.with_name(wheel.name + ".slim")
    record, lines = "", []
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(slim, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            if name.endswith(".dist-info/RECORD"):
                record = name
                continue
            if not keep(name):
                continue
            data = old.read(name)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(data)}")
            new.writestr(old.getinfo(name), data, zipfile.ZIP_DEFLATED)
        new.writestr(record, "\n".join([*lines, f"{record},,", ""]))
    slim.replace(wheel)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--cuda", default="130")
    parser.add_argument("--there", type=Path)
    parser.add_argument("--debs", action="store_true")
    parser.add_argument("--unsloth", action="store_true")
    parser.add_argument("--mib", type=float, default=64.0, help="the most that may be carried")
    args = parser.parse_args()
    folder = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("*.whl"), *folder.glob("*.deb")):
        old.unlink()
    own = build_own(folder)
    there = present(args.there)
    wanted = lacking(own, args.python, there)
    pip("download", "-q", "--no-deps", "-d", str(folder), *target(args.python), *wanted)
    for wheel in folder.glob("bitsandbytes-*.whl"):
        keep_one_cuda(wheel, args.cuda)
    if args.unsloth:
        gather_unsloth(folder, args.python, there)
    if args.debs:
        subprocess.run(["apt-get", "download", *DEBS], cwd=folder, check=True)
    (folder / "setup.sh").write_text(SETUP.format(folder=folder), encoding="utf-8")
    text = RUN.format(folder=folder, minutes=5)
    (folder / "RUN.txt").write_text(text, encoding="utf-8")
    files = sorted(folder.iterdir())
    total = sum(path.stat().st_size for path in files)
    for path in files:
        print(f"{path.stat().st_size / 2**20:8.2f} MiB  {path.name}")
    print(f"{total / 2**20:8.2f} MiB in all\n\n{text}")
    if total > args.mib * 2**20:
        raise SystemExit(f"that is more than {args.mib:g} MiB: name what is there with --there")


if __name__ == "__main__":
    main()
