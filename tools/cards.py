"""Writes the table of docs/memory.md: which models train on which cards, and how long it takes.

usage: python tools/cards.py [MODEL ...]

Minutes of planning, and no GPU. Dimensions are those of the published config.json files.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from qlora_wgpu import runs
from qlora_wgpu.runs.estimation import SIZES, CardPlan

PAGE = Path(__file__).parents[1] / "docs" / "memory.md"
FIRST, LAST = "<!-- cards -->", "<!-- end of cards -->"
_LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "hidden_act": "silu",
}  # fmt: skip
_QWEN3 = _LLAMA | {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128}


def _dims(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "tie_word_embeddings": tied,
    }  # fmt: skip


MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": _LLAMA | _dims(2048, 8192, 16, 32, True),
    "Llama-3.2-3B": _LLAMA | _dims(3072, 8192, 28, 24, True),
    "Llama-3.1-8B": _LLAMA | _dims(4096, 14336, 32, 32, False),
    "Qwen3-14B": _QWEN3 | _dims(5120, 17408, 40, 40, False),
    "Qwen3-30B-A3B": _QWEN3
    | _dims(2048, 6144, 48, 32, False)
    | {
        "model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "Qwen3-32B": _QWEN3 | _dims(5120, 25600, 64, 64, False),
    "Llama-3.1-70B": _LLAMA | _dims(8192, 28672, 80, 64, False),
}  # fmt: skip


def row(name: str) -> str:
    """A model's line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(MODELS[name]), encoding="utf-8")
        plans = runs.estimate(path, seq=2048, cards=True).cards
    cells = [cell(plan) for plan in plans]
    cells += ["1.00"] * (len(SIZES) - len(cells))  # where all of it is, and longer rows fit
    return f"| {name} | {' | '.join(cells)} |"


def cell(plan: CardPlan) -> str:
    """The slow-down at the planned length, and the longest row."""
    if plan.slow_down is None:
        return "-"
    longest = plan.longest_seq // 1024
    return f"{plan.slow_down:.2f}, {longest}k"


def main() -> None:
    """Replaces the table, or prints the lines of the models that were named."""
    named = sys.argv[1:]
    if named:
        print("\n".join(row(name) for name in named))
        return
    sizes = [f"{size} GB" for size in SIZES]
    lines = [f"| model | {' | '.join(sizes)} |", "|---" * (len(SIZES) + 1) + "|"]
    lines += [row(name) for name in MODELS]
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(FIRST + "\n")
    _, after = rest.split(LAST)
    table = "\n".join(lines)
    PAGE.write_text(f"{before}{FIRST}\n\n{table}\n\n{LAST}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
