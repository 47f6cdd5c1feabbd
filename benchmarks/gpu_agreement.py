"""First losses of one contender on a folder of random weights that all of them read.

usage: python benchmarks/gpu_agreement.py OUT FOLDER SHAPE -- COMMAND ...

FOLDER gets the model and the adapter that all start from, unless they are there. COMMAND is one of
benchmarks/peers; its last line is kept as OUT.json.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from compare import write_adapter
from gpu_session import end_with_parent
from shapes import write_random_model

_RANK = 8


def main() -> None:
    out, folder, shape, _, *command = sys.argv[1:]
    model, adapter = Path(folder) / "model", Path(folder) / "adapter"
    done = Path(folder) / "whole"
    if not done.exists():
        write_random_model(model, shape)
        write_adapter(adapter, shape, _RANK)
        done.touch()
    sizes = ["--rank", str(_RANK), "--adapter", str(adapter)]
    run = subprocess.run(
        [*command, str(model), *sizes], stdout=subprocess.PIPE, encoding="utf-8",
        preexec_fn=end_with_parent,
    )  # fmt: skip
    print(run.stdout)
    if run.returncode:
        raise SystemExit(run.returncode)
    Path(f"{out}.json").write_text(run.stdout.splitlines()[-1] + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
