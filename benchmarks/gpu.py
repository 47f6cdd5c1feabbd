"""All that a GPU machine can tell, in calls that may be cut off and gone on with.

usage: python benchmarks/gpu.py FOLDER --call 1|2|3|4 [--archive FILE] [--peft PYTHON]
           [--minutes N] [--again NAME ...] [--small]

FOLDER keeps the state, whole logs and results; FILE (FOLDER.tar.gz unless named) is an archive of
it, written anew after every part, and where FOLDER is not there it is unpacked from FILE. The same
command again goes on with what is left: what is done is not repeated, unless --again names it by
the beginning of its name. Without a card nothing is measured, and its exit code is 2: the summary
tells where a driver was looked for. benchmarks/README.md
says what to carry to a machine without a network.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from gpu_calls import ALONE, BACKENDS, HERE, SMALL, Calls, Sizes
from gpu_driver import find_driver
from gpu_rows import SECONDS
from gpu_session import Session
from gpu_summary import summary
from gpu_written import in_short, written

_OPENINGS = 3
_LIBRARIES = ("vulkan", "nvidia", "libEGL", "libX11", "libXext")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--call", type=int, required=True, choices=[1, 2, 3, 4])
    parser.add_argument("--archive", type=Path)
    parser.add_argument("--peft", help="Python with torch, PEFT and bitsandbytes")
    parser.add_argument("--minutes", type=float, default=4.75, help="when to end, at the latest")
    parser.add_argument("--again", nargs="*", default=[], help="parts to measure anew")
    parser.add_argument("--small", action="store_true", help="small shapes, to try the script")
    args = parser.parse_args()
    folder = args.folder.resolve()
    archive = args.archive or folder.with_name(f"{folder.name}.tar.gz")
    session = Session(folder, archive.resolve(), args.minutes, lambda: tell(folder))
    session.forget(args.again)
    sizes = SMALL if args.small else Sizes()
    calls = Calls(sizes, session, list(BACKENDS), args.peft or sys.executable)
    prepare(folder, sizes)
    card = opened(calls, session)
    if card:
        calls.measure_with(card)
        run(calls, session, args.call)
    tell(folder)
    session.close()
    return 0 if card else 2


def prepare(folder: Path, sizes: Sizes) -> None:
    """What all parts find in their environment; ``driver.txt`` gets what Vulkan lists."""
    # What is timed and checked once is known in the next call.
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    # The code beside this script is measured, whatever wheel of the project gives its metadata.
    searched = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(HERE.parent), *([searched] if searched else [])]
    )
    os.environ |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    if sizes.row_seconds:
        os.environ[SECONDS] = str(sizes.row_seconds)
    tried = find_driver(folder=folder)
    (folder / "driver.txt").write_text(
        "".join(f"{each}\n" for each in tried) + machine(), encoding="utf-8"
    )
    if tried[-1].cards:
        os.environ |= tried[-1].environment


def machine() -> str:
    """What the machine says of its card, memory and processors."""
    said = []
    for command in (["nvidia-smi", "-L"], ["nvidia-smi"], ["ldconfig", "-p"], ["free", "-m"]):
        try:
            done = subprocess.run(command, capture_output=True, timeout=20, encoding="utf-8")
            lines = (done.stdout + done.stderr).splitlines()
        except (OSError, subprocess.TimeoutExpired) as err:
            lines = [str(err)]
        if command[0] == "ldconfig":
            lines = [line for line in lines if any(name in line for name in _LIBRARIES)]
        said += [f"$ {' '.join(command)}", *lines]
    return "\n".join([*said, f"{os.cpu_count()} processors", ""])


def opened(calls: Calls, session: Session) -> dict[str, str]:
    """What each backend opens; a driver that crashes at matrix units is opened without them."""
    session.forget(["device-"])
    for _ in range(_OPENINGS):
        session.run(calls.devices())
        if not any(p.get("why", "").startswith("SIG") for p in session.state.values()):
            break
    found = calls.opened(session)
    seen = session.folder / "cards.json"
    names = json.loads(seen.read_text(encoding="utf-8")) if seen.exists() else []
    seen.write_text(json.dumps(sorted({*names, *found.values()})), encoding="utf-8")
    return found


def run(calls: Calls, session: Session, call: int) -> None:
    """What earlier calls left comes first, and last what failed in them; call 4 is alone."""
    numbers = [call] if call == ALONE else range(1, call + 1)
    parts = [part for number in numbers for part in calls.parts(number)]
    session.run(parts, failed=False)
    session.run(parts)


def tell(folder: Path) -> None:
    """Writes the summary, and prints what it comes to last."""
    figures = summary(folder)
    (folder / "summary.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    short = in_short(figures)
    (folder / "summary.txt").write_text(f"{short}\n{written(figures)}", encoding="utf-8")
    print(f"{written(figures)}\n{short}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
