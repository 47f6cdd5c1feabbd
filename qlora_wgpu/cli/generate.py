"""``generate``: text from a base model, with or without an adapter."""

from __future__ import annotations

import sys

import click
from rich.console import Console

from qlora_wgpu.checkpoint import ModelFolder, load_adapter
from qlora_wgpu.cli.opening import open_model
from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.data import Tokenizer, find_chat_template
from qlora_wgpu.errors import TokenizerError
from qlora_wgpu.generation import generate as generate_tokens


@click.command()
@click.option("--model", "model_path", required=True, help="Folder or hub name of the base model.")
@click.option("--adapter", help="Folder of a PEFT adapter.")
@click.option("--prompt", required=True, help="What the text goes on from.")
@click.option(
    "--chat", is_flag=True, help="Put the prompt into the chat template as a user's turn."
)
@click.option("--max-new-tokens", default=100, show_default=True, type=click.IntRange(1))
@click.option(
    "--temperature", default=0.0, show_default=True, type=click.FloatRange(0), help="0 is greedy."
)
@click.option("--top-k", default=0, show_default=True, type=click.IntRange(0), help="0 is all.")
@click.option("--top-p", default=1.0, show_default=True, type=click.FloatRange(0, 1, min_open=True))
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@click.option("--scheme", default="nf4", show_default=True, type=click.Choice(["nf4", "none"]))
@click.option(
    "--compute-dtype",
    default="bfloat16",
    show_default=True,
    type=click.Choice(["bfloat16", "float32"]),
)
@click.option("--device", default="auto", show_default=True, help="Adapter, as doctor lists them.")
def generate(
    model_path: str,
    adapter: str | None,
    prompt: str,
    chat: bool,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    scheme: str,
    compute_dtype: str,
    device: str,
) -> None:
    """Generate text with a model, and an adapter if one is given."""
    console = Console(stderr=True)
    folder = ModelFolder.open(model_path)
    tokenizer = Tokenizer.from_folder(folder.path)
    lora = LoraConfig(r=1, lora_alpha=1)
    if adapter is not None:
        _, found = load_adapter(adapter)
        lora = LoraConfig(
            r=found.r,
            lora_alpha=found.lora_alpha,
            use_rslora=found.use_rslora,
            target_modules=found.target_modules,
        )
    prompt_ids = _chat_ids(tokenizer, prompt) if chat else tokenizer.encode(prompt)
    model = open_model(
        console,
        model_path,
        lora=lora,
        quant=QuantConfig(scheme=scheme),
        compute_dtype=compute_dtype,
        device=device,
    )
    if adapter is not None:
        model.load_adapter(adapter)
    ids: list[int] = []
    shown = ""
    if not chat:
        sys.stdout.write(prompt)
    for token in generate_tokens(
        model,
        prompt_ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop_ids=tokenizer.eos_token_ids,
        max_length=folder.config.get("max_position_embeddings"),
    ):
        ids.append(token)
        text = tokenizer.decode(ids)
        # Half a character decodes to the replacement sign: wait for its other half.
        if not text.endswith("\ufffd"):
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    sys.stdout.write("\n")


def _chat_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    template = find_chat_template(None, tokenizer)
    if template is None:
        raise TokenizerError("the model has no chat template: leave out --chat")
    text = template.render([{"role": "user", "content": prompt}], add_generation_prompt=True).text
    return tokenizer.encode(text, add_special_tokens=False)
