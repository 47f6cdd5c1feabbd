"""Every kind of adapter through every verb, as a user meets them.

usage: python -m campaigns.adapter_walk [--count KINDS] [--seed S]
                                        [--only TEXT;TEXT] [--verbs VERB,VERB]
                                        [--torch PYTHON] [--llama LIBRARY]

Each kind of adapter is trained on a small base, killed and resumed, trained on from, measured,
asked for texts, served beside another one, merged, exported, pushed to a hub on this machine, and
opened from Python. PYTHON has torch, transformers and peft: it makes the adapters that PEFT alone
makes, and computes the logits of adapters and merged models. LIBRARY is llama.cpp's, see
``tests/references/llama_cpp.py``. Kinds are chosen by parts of their labels ("plain, tied");
``estimate`` writes the configuration that other verbs read. Tells what became of each verb, and
ends with 1 if one is wrong, or refuses what ``adapter_kinds.py`` does not say.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from campaigns.adapter_kinds import KINDS, Kind, write_place
from campaigns.adapter_verbs import ROOT, Refused, Walk, Wrong

MOST_APART = 1e-4  # of logits in float32, of which the largest are between 1 and 30


def walked(place: Path, kind: Kind, results: dict[str, str]) -> Walk:
    """Takes a kind through all verbs; what becomes of each goes into ``results``."""
    walk = Walk(place, kind)
    for name, verb in walk.verbs():
        expected = kind.refused.get(name)
        try:
            verb()
            results[name] = "works" if expected is None else "WRONG: was to be refused"
        except Refused as told:
            is_known = expected is not None and expected in str(told)
            results[name] = f"{'refused' if is_known else 'REFUSED'}: {told}"
        except Wrong as wrong:
            results[name] = f"WRONG: {wrong}"
        except Exception:
            results[name] = f"WRONG: {traceback.format_exc()}"
        print(f"{kind.label:24} {name:12} {results[name]}", flush=True)
        if name == "train" and results[name] != "works":
            break
    return walk


def with_torch(python: str, place: Path, verb: str, tasks: list[dict[str, Any]]) -> None:
    """Has the other Python do what is in the list."""
    (place / "tasks.json").write_text(json.dumps(tasks))
    script = [python, str(ROOT / "tests" / "references" / "walked_adapters.py"), verb, str(place)]
    subprocess.run(script, check=True)


def compare(place: Path, walks: list[Walk], table: dict[str, dict[str, str]]) -> None:
    """Holds PyTorch's logits to this package's."""
    answers = json.loads((place / "answers.json").read_text())
    for walk in walks:
        for name, (exact, case) in walk.exact.items():
            if f"{case} error" in answers:
                told = f"WRONG: {answers[f'{case} error']}"
            else:
                theirs = np.load(place / f"{case}.npy")[..., : exact.shape[-1]]
                apart = float(np.abs(theirs - exact[..., : theirs.shape[-1]]).max())
                base = walk.base_logits
                moved = float(np.abs(base - exact[..., : base.shape[-1]]).max())
                told = f"works ({apart:.1e} apart, moved by {moved:.1e})"
                if not apart <= MOST_APART or not moved > 100 * MOST_APART:
                    told = f"WRONG: {apart:.1e} apart, moved by {moved:.1e}"
            table[walk.kind.label][name] = told
            print(f"{walk.kind.label:24} {name:12} {told}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, help="how many kinds, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--verbs", default="")
    parser.add_argument("--torch")
    parser.add_argument("--llama")
    parser.add_argument("--keep")
    asked = parser.parse_args()
    kinds = [kind for kind in KINDS if any(o in kind.label for o in asked.only.split(";"))]
    kinds = [kind for kind in kinds if kind.peft is None or asked.torch]
    if asked.count is not None:
        kinds = random.Random(asked.seed).sample(kinds, min(asked.count, len(kinds)))
    place = Path(asked.keep or tempfile.mkdtemp(prefix="walk-"))
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    write_place(place, {kind.base for kind in kinds})
    Walk.llama_library = asked.llama
    Walk.chosen = [verb for verb in asked.verbs.split(",") if verb]
    made = [
        {"case": kind.label, "base": kind.base, "out": kind.slug, "peft": kind.peft}
        for kind in kinds if kind.peft
    ]  # fmt: skip
    if made:
        with_torch(asked.torch, place, "make", made)
    table: dict[str, dict[str, str]] = {kind.label: {} for kind in kinds}
    walks = [walked(place, kind, table[kind.label]) for kind in kinds]
    if asked.torch:
        with_torch(asked.torch, place, "check", [task for walk in walks for task in walk.tasks])
        compare(place, walks, table)
    bad = [
        f"{label}, {verb}: {told}"
        for label, row in table.items()
        for verb, told in row.items()
        if told.startswith(("WRONG", "REFUSED"))
    ]
    print(f"{sum(map(len, table.values()))} verbs of {len(kinds)} kinds, {len(bad)} are wrong")
    print("\n".join(bad))
    if not asked.keep:
        shutil.rmtree(place)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
