"""Records the token ids of prompts with images by transformers' processors.

usage: python tests/references/record_image_prompts.py    with transformers and Pillow installed

The tokenizer has a token for each byte and the families' special tokens. Runs of a token are
recorded as its id and their length. Processors whose package needs more than Pillow (num2words,
torchvision) are made without their constructors.
"""

from __future__ import annotations

import json
import sys
import tempfile
from itertools import groupby
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.image_models import FAMILIES, SIZES, folder_of, rgb_of

RECORD = Path(__file__).parents[1] / "data/image_prompts.json"
MESSAGES = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "Compare\n"},
            {"type": "image"},
            {"type": "image"},
            {"type": "text", "text": "\nand "},
            {"type": "image"},
        ],
    },
    {"role": "assistant", "content": [{"type": "text", "text": "They are alike."}]},
]


def processor_of(family: str, folder: Path):
    from transformers import PreTrainedTokenizerFast
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    kept = json.loads((folder / "tokenizer_config.json").read_text())
    extra = {k: v for k, v in kept.items() if k.endswith("_token") and k not in ("eos_token",)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="</s>", bos_token="<s>",
        extra_special_tokens=extra, chat_template=kept["chat_template"],
    )  # fmt: skip
    backend = "torchvision" if family == "lfm2_vl" else "pil"  # which has no other
    images = AutoImageProcessor.from_pretrained(folder, backend=backend)
    settings = json.loads((folder / "processor_config.json").read_text())
    kind = _class(family)
    processor = kind.__new__(kind)
    processor.image_processor, processor.tokenizer = images, tokenizer
    for key, value in settings.items():
        setattr(processor, key, value)
    if family in ("idefics3", "smolvlm"):
        processor.fake_image_token = "<fake_token_around_image>"
        processor.global_image_tag = processor.global_image_token = "<global-img>"
    if family == "gemma3":
        count = settings["image_seq_length"]
        begin, end, one = extra["boi_token"], extra["eoi_token"], extra["image_token"]
        processor.full_image_sequence = f"\n\n{begin}{one * count}{end}\n\n"
        processor.image_token = begin
    elif family in ("gemma4", "lfm2_vl"):
        for key, token in extra.items():
            setattr(processor, key, token)
    else:
        processor.image_token = extra["image_token"]
    return processor


class Pixtral:
    """In place of PixtralProcessor, which cannot be imported without torchvision."""

    def replace_image_token(self, inputs, number):
        unit = self.patch_size * self.spatial_merge_size
        rows, columns = (side // unit for side in inputs["image_sizes"][number])
        line = self.image_token * columns
        return self.image_break_token.join([line] * rows) + self.image_end_token


def _class(family: str):
    import transformers
    from transformers.models.smolvlm import processing_smolvlm

    names = {
        "idefics3": transformers.Idefics3Processor,
        "smolvlm": processing_smolvlm.SmolVLMProcessor,
        "llava": transformers.LlavaProcessor,
        "llava_next": transformers.LlavaNextProcessor,
        "gemma3": transformers.Gemma3Processor,
        "gemma4": transformers.Gemma4Processor,
        "lfm2_vl": transformers.Lfm2VlProcessor,
        "mistral3": Pixtral,
        "qwen2_vl": transformers.Qwen2VLProcessor,
    }
    return names[family]


def ids_of(family: str, sizes) -> list[list[int]]:
    """Runs of token ids, as [id, length]."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as place:
        folder = folder_of(family, Path(place))
        processor = processor_of(family, folder)
        text = processor.tokenizer.apply_chat_template(MESSAGES, tokenize=False)
        images = [Image.fromarray(rgb_of(*size)) for size in sizes]
        tiled = family in ("idefics3", "smolvlm", "lfm2_vl")
        kwargs = {"return_row_col_info": True} if tiled else {}
        nested = [images] if family in ("idefics3", "smolvlm", "gemma3") else images
        if family == "mistral3":
            kwargs["patch_size"] = processor.patch_size * processor.spatial_merge_size
        inputs = processor.image_processor(nested, **kwargs)
        for number in range(len(images)):
            special = {"use_image_special_tokens": True} if family == "lfm2_vl" else {}
            replacement = processor.replace_image_token(inputs, number, **special)
            text = text.replace(processor.image_token, f"\0{number}\0", 1)
            text = text.replace(f"\0{number}\0", replacement.replace(processor.image_token, "\1"))
        text = text.replace("\1", processor.image_token)
        ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [[int(key), len(list(run))] for key, run in groupby(ids)]


def main() -> None:
    record = {
        family: [ids_of(family, sizes) for sizes in SIZES] for family in sys.argv[1:] or FAMILIES
    }
    old = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    RECORD.write_text(json.dumps({**old, **record}, separators=(",", ":")) + "\n")
    print({family: [sum(n for _, n in runs) for runs in each] for family, each in record.items()})


if __name__ == "__main__":
    np.random.seed(0)
    main()
