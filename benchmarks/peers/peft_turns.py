"""PEFT + bitsandbytes as a participant of benchmarks/gpu_rivals.py.

usage: PYTHON peft_turns.py [--compile] [--graphs]

Plain rows need no mask, so that torch's sdpa takes its fastest kernel; packed ones get the block
mask that transformers makes of position ids.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from peft_step import load, versions
from torch_turns import TorchTurns, compiled_notes
from turns import Answer, Rows, Turn, Work, serve

_CAUSAL = "causal_sdpa"  # for which transformers makes no mask, and reads no position ids to see if


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="torch.compile of the whole model")
    parser.add_argument("--graphs", action="store_true", help="steps as CUDA graphs")
    options = parser.parse_args()

    def loaded(asked: Answer) -> tuple[Answer, Turn]:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if options.graphs and device != "cuda":
            raise RuntimeError(f"a CUDA graph needs a CUDA device, and torch finds {device} only")
        args = argparse.Namespace(
            model=asked["folder"], rank=asked["rank"], adapter=None, quant="nf4",
            compute="bfloat16", device=device, checkpointing=False,
        )  # fmt: skip
        model = load(args)
        model.config.use_cache = False  # with a cache, transformers tells no packed samples apart
        register_causal()
        if options.compile:
            model.compile(dynamic=False)
        turns = TorchTurns(
            model, device, lambda rows, work: inputs(model, rows, work, device),
            graphs=options.graphs,
        )  # fmt: skip

        def turn(work: Work) -> Answer:
            answer = {**turns(work), "attention": attention(work)}
            return {**answer, **compiled_notes()} if options.compile else answer

        return {"versions": versions(), "device": device}, turn

    serve(loaded)


def register_causal() -> None:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(_CAUSAL, sdpa_attention_forward)


def inputs(model: Any, rows: Rows, work: Work, device: str) -> dict[str, torch.Tensor]:
    """The model's arguments; its attention is set along with them."""
    model.config._attn_implementation = "sdpa" if work.packed else _CAUSAL
    given = {"input_ids": rows.ids, "labels": rows.labels}
    if work.packed:
        given["position_ids"] = rows.positions
    return {name: torch.from_numpy(values).to(device) for name, values in given.items()}


def attention(work: Work) -> str:
    return "sdpa with a block mask of position ids" if work.packed else "sdpa"


if __name__ == "__main__":
    main()
