"""Writes the table of docs/models.md from the families and their recorded tests.

usage: PYTHONPATH=tests python -m tools.models           writes it
       PYTHONPATH=tests python -m tools.models --check   fails if it is out of date
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from families.test_config_keys import TRIALS
from families.test_published_sizes import MODELS

from qlora_wgpu.families.family import known_families
from qlora_wgpu.gguf.architectures import BY_MODEL_TYPE, model_type_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/models.md"
_HEAD = """<!-- Written by tools/models.py: change a family or its tests and run it again. -->
# Models

A model is supported if its `model_type` in config.json is in this table. Every family can be
trained from a Hugging Face folder, which is quantized to NF4, or from [quantized
formats](quantized.md). Families with an architecture in the column GGUF can also be read from
GGUF files and [exported](export.md) to them; the others are refused. The [FAQ](faq.md) describes
vision-language models.

*Sizes* are published models whose config.json is read in the tests, with billions of parameters.
*PyTorch* is the number of recorded models whose logits, LoRA gradients and losses are compared with
transformers and PEFT. *Keys* is the number of variations of config.json whose logits are compared
with transformers. A vision-language model uses the recordings of its language model.

| models | `model_type` | sizes | GGUF | PyTorch | keys |
|---|---|---|---|---|---|
"""
_LEFT_OUT = """
Not supported:

- `glm_moe_dsa` and `minimax_m3_vl`: an indexer with trained weights chooses the keys that each
  query attends to, and no published size of either fits a machine with one GPU.
- `phimoe`: its router samples experts at random in training, so there is no exact reference.
"""


def page() -> str:
    """The whole page."""
    cases = Counter(_recorded_types())
    keys = Counter(model_type for model_type, _ in TRIALS)
    rows = (_row(name, cases[name], keys[name]) for name in known_families())
    return _HEAD + "".join(rows) + _LEFT_OUT


def _row(model_type: str, cases: int, keys: int) -> str:
    module = importlib.import_module(f"qlora_wgpu.families.{model_type}")
    what = (module.__doc__ or "").strip().splitlines()[0].rstrip(".")
    sizes = [
        f"{name} ({billions})"
        for name, (config, billions) in MODELS.items()
        if config["model_type"] == model_type
    ]
    row = BY_MODEL_TYPE.get(model_type_of({"model_type": model_type}))
    gguf = "" if row is None else f"`{row.name}`"
    cells = (what, f"`{model_type}`", ", ".join(sizes), gguf, cases or "", keys or "")
    return f"| {' | '.join(map(str, cells))} |\n"


def _recorded_types() -> list[str]:
    found = []
    for path in sorted((ROOT / "tests/references").glob("*.npz")):
        with np.load(path) as archive:
            if "config" in archive:
                found.append(json.loads(str(archive["config"]))["model_type"])
    return found


def main() -> int:
    """Writes or checks the page."""
    written = page()
    if "--check" in sys.argv[1:]:
        return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != written)
    PAGE.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
