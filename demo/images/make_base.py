"""Makes the base model of the image demo from nothing: a small Idefics 3 that describes pictures.

    python -m pip install 'torch>=2.9' transformers tokenizers pillow
    python demo/images/make_base.py

It takes about 20 minutes on two cores of a server CPU and writes the folder demo/images/base in
Hugging Face's layout. The base model has read descriptions of pictures, never a question about
one: that is left to the fine-tuning (see make_data.py).
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

sys.path.insert(0, str(Path(__file__).parents[1]))

from dice import Dice
from scenes import SIDE, captions, draw_scene, paint, questions

HERE = Path(__file__).parent
SEED = 31_337
PATCH, SHUFFLE = 4, 2
IMAGE_TOKENS = (SIDE // PATCH // SHUFFLE) ** 2
BATCH_SIZE = 64
LEARNING_RATE = 3e-3
PAD, BOS, END, IMAGE = "<|pad|>", "<|bos|>", "<end_of_utterance>", "<image>"
FRAME, WHOLE = "<fake_token_around_image>", "<global-img>"
SPECIAL_TOKENS = (PAD, BOS, END, IMAGE, FRAME, WHOLE, "User:", "Assistant:")
CHAT_TEMPLATE = """{{- bos_token -}}
{%- for message in messages -%}
    {%- if message['role'] == 'user' -%}
        {{- 'User:' -}}
        {%- for part in message['content'] -%}
            {%- if part['type'] == 'image' -%}{{- '<image>' -}}
            {%- else -%}{{- ' ' + part['text'] -}}{%- endif -%}
        {%- endfor -%}
        {{- '<end_of_utterance>' -}}
    {%- elif message['role'] == 'assistant' -%}
        {{- 'Assistant:' -}}
        {%- generation -%}
            {%- if message['content'] is string -%}{{- ' ' + message['content'] -}}
            {%- else -%}
                {%- for part in message['content'] -%}{{- ' ' + part['text'] -}}{%- endfor -%}
            {%- endif -%}
            {{- '<end_of_utterance>' -}}
        {%- endgeneration -%}
    {%- else -%}
        {{- raise_exception('this model knows the roles user and assistant only') -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- 'Assistant:' -}}
{%- endif -%}
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of the words of captions and questions."""
    dice, texts = Dice(SEED), []
    for _ in range(2000):
        scene = draw_scene(dice)
        texts += captions(scene) + [f" {q} {a}" for q, a in questions(scene)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[IMAGE, FRAME, WHOLE],
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )


def make_config(tokenizer: PreTrainedTokenizerFast) -> Idefics3Config:
    """A SigLIP of three layers and a Llama of four."""
    ids = tokenizer.convert_tokens_to_ids
    return Idefics3Config(
        image_token_id=ids(IMAGE),
        scale_factor=SHUFFLE,
        tie_word_embeddings=True,
        pad_token_id=ids(PAD),
        vision_config={
            "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3,
            "num_attention_heads": 4, "image_size": SIDE, "patch_size": PATCH,
        },
        text_config={
            "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 96,
            "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5, "initializer_range": 0.05, "tie_word_embeddings": True,
            "bos_token_id": ids(BOS), "eos_token_id": ids(END), "pad_token_id": ids(PAD),
        },
    )  # fmt: skip


def make_batch(
    dice: Dice, tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pictures with a caption each: ids, labels and pixels."""
    ids = tokenizer.convert_tokens_to_ids
    prefix = [ids(BOS), ids(FRAME), ids(WHOLE), *[ids(IMAGE)] * IMAGE_TOKENS, ids(FRAME)]
    rows, pixels = [], []
    for _ in range(BATCH_SIZE):
        scene = draw_scene(dice)
        pixels.append(np.asarray(paint(scene, dice), np.float32))
        kinds = captions(scene)
        text = kinds[0] if dice.chance(0.6) else dice.pick(kinds[1:])
        rows.append([*tokenizer.encode(" " + text, add_special_tokens=False), ids(END)])
    longest = max(map(len, rows))
    padded = [row + [ids(PAD)] * (longest - len(row)) for row in rows]
    ignored = [[-100] * len(prefix) + row + [-100] * (longest - len(row)) for row in rows]
    images = torch.tensor(np.stack(pixels) / 127.5 - 1).permute(0, 3, 1, 2)[:, None]
    return torch.tensor([prefix + row for row in padded]), torch.tensor(ignored), images


def train(
    model: Idefics3ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, steps: int
) -> None:
    """Trains all weights with a cosine schedule, each step on new pictures."""
    dice = Dice(SEED + 1)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1.0, (step + 1) / 100)
            * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        ),
    )
    started, mean = time.monotonic(), 0.0
    for step in range(steps):
        ids, labels, images = make_batch(dice, tokenizer)
        loss = model(input_ids=ids, pixel_values=images, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        mean = loss.item() if step == 0 else 0.95 * mean + 0.05 * loss.item()
        if step % 100 == 0 or step == steps - 1:
            seconds = time.monotonic() - started
            print(f"step {step}/{steps}: loss {mean:.3f}, {seconds:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the base model of the image demo.")
    parser.add_argument("--out", type=Path, default=HERE / "base")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer()
    model = Idefics3ForConditionalGeneration(make_config(tokenizer))
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens", flush=True)
    train(model, tokenizer, arguments.steps)
    side = {"longest_edge": SIDE}
    image_processor = Idefics3ImageProcessorPil(
        do_image_splitting=False, size=side, max_image_size=side
    )
    processor = Idefics3Processor(
        image_processor, tokenizer, image_seq_len=IMAGE_TOKENS, chat_template=CHAT_TEMPLATE
    )
    model.to(torch.bfloat16).save_pretrained(arguments.out)
    processor.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
