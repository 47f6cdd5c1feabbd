"""Unsloth as a participant of benchmarks/gpu_rivals.py.

usage: PYTHON unsloth_turns.py

Without xformers and FlashAttention it takes torch's attention. Packed rows are laid end to end, as
its trainer does, and told apart by ``packed_seq_lengths``.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from turns import Answer, Rows, Turn, Work, serve

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_PACKAGES = ("unsloth", "unsloth_zoo", "torch", "transformers", "peft", "trl", "bitsandbytes")
_WORDS = ("<unk>", "<s>", "</s>", "<pad>")


def loaded(asked: Answer) -> tuple[Answer, Turn]:
    """Loads the folder that all read."""
    if find_spec("unsloth") is None:
        raise RuntimeError("unsloth is not installed in this Python")
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("unsloth's kernels need a GPU, and torch finds none")
    folder = Path(asked["folder"])
    os.environ |= {
        "UNSLOTH_DISABLE_STATISTICS": "1",  # it would ask the network
        "UNSLOTH_COMPILE_LOCATION": str(folder.parent / "unsloth_compiled_cache"),
    }
    from unsloth import FastLanguageModel

    write_tokenizer(folder)
    model, _ = FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=asked["longest"], dtype=torch.bfloat16, load_in_4bit=True,
        use_gradient_checkpointing=False, offload_embedding=False,
    )  # fmt: skip
    model = FastLanguageModel.get_peft_model(
        model, r=asked["rank"], lora_alpha=2 * asked["rank"], target_modules=MODULES,
        lora_dropout=0.0, bias="none", use_gradient_checkpointing=False, random_state=1,
    )  # fmt: skip
    model.config.use_cache = False
    FastLanguageModel.for_training(model, use_gradient_checkpointing=False)
    from torch_turns import TorchTurns

    turns = TorchTurns(model, "cuda", inputs)

    def turn(work: Work) -> Answer:
        return {**turns(work), "attention": attention(packed=work.packed)}

    return {"versions": {name: version(name) for name in _PACKAGES}, "device": "cuda"}, turn


def write_tokenizer(folder: Path) -> None:
    """Next to nothing: it loads none of its models without one."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(_WORDS)}, unk_token=_WORDS[0]))
    names = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), _WORDS, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder)


def inputs(rows: Rows, work: Work) -> dict[str, Any]:
    """The model's arguments."""
    import torch

    given = {"input_ids": rows.ids, "labels": rows.labels}
    if not work.packed:
        return {name: torch.from_numpy(values).cuda() for name, values in given.items()}
    given["position_ids"] = rows.positions
    flat = {name: torch.from_numpy(v.reshape(1, -1)).cuda() for name, v in given.items()}
    return {**flat, "packed_seq_lengths": torch.tensor(rows.lengths, dtype=torch.int32)}


def attention(*, packed: bool) -> str:
    """Which one it chose."""
    from unsloth.utils.attention_dispatch import select_attention_backend

    chosen = select_attention_backend(packed)
    return f"{chosen}, one row with packed_seq_lengths" if packed else str(chosen)


if __name__ == "__main__":
    serve(loaded)
