"""``merge``, ``quantize`` and ``export``: what was trained, for other programs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
from rich.console import Console

from qlora_wgpu.cli._display import Display
from qlora_wgpu.cli._model import Opening, located, opening_options, run_argument
from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.config import Config, QuantConfig
from qlora_wgpu.config.as_trained import changed, find_run
from qlora_wgpu.errors import ConfigError, TokenizerError
from qlora_wgpu.export import export_gguf, quantize_folder
from qlora_wgpu.export import merge as merge_adapter
from qlora_wgpu.runs import OpenedModel
from qlora_wgpu.runs.opening import load_adapted
from qlora_wgpu.runs.prompts import tokenizer_for

_SAMPLE = (
    "The quick brown fox jumps over the lazy dog. Two plus three makes five, and water boils at "
    "one hundred degrees. Once upon a time there was a little house by the sea."
)
_SAMPLE_TOKENS = 64
_BLOCKSIZES = ["32", "64", "128", "256", "512", "1024", "2048", "4096"]


@click.command()
@opening_options(needs_adapter=True)
@click.option("--out", show_default="merged, in RUN", help="The new model's folder.")
@click.option(
    "--base",
    default="original",
    show_default=True,
    type=click.Choice(["original", "dequantized"]),
    help="Add the adapter to the stored weights, or to what they were in training, after NF4.",
)
@click.option(
    "--check/--no-check",
    default=True,
    help="Whether to measure how far the merged model's logits drift.",
)
def merge(opening: Opening, out: str | None, base: str, check: bool) -> None:
    """Merge an adapter into its base model.

    RUN is a run's folder, such as runs/first, or an adapter's.

    The result is a model folder in the base's own 16-bit type, which transformers, vLLM and
    llama.cpp's converter load. How the base was quantized is known from the config.yaml of the
    adapter's run.
    """
    console = Terminal()
    with Display(console) as display:
        settings = opening.settings(display)
    assert opening.adapter is not None
    out = out or _beside(opening.adapter, "merged", "--out")
    with _progress(console, "merging") as progress:
        merge_adapter(
            opening.model,
            opening.adapter,
            out,
            base="dequantized" if base == "dequantized" else "original",
            quant=settings.quant,
            progress=progress,
        )
    console.print(f"merged into {out}", highlight=False)
    if check:
        console.print(_drift(console, opening, settings, out), highlight=False)


@click.command()
@click.option("--model", "model_path", required=True, help="Folder or hub name of the model.")
@click.option("--out", required=True, help="The new folder.")
@click.option(
    "--blocksize",
    default="64",
    show_default=True,
    type=click.Choice(_BLOCKSIZES),
    help="Number of weights that share a scale.",
)
@click.option(
    "--double-quant/--no-double-quant",
    default=True,
    show_default=True,
    help="Store the scales in 8 bits, too.",
)
@click.option(
    "--experts/--no-experts",
    default=False,
    show_default=True,
    help="Quantize experts, too: a quarter of their size, but transformers cannot open it.",
)
def quantize(model_path: str, out: str, blocksize: str, double_quant: bool, experts: bool) -> None:
    """Write a model with its linear layers in 4 bits (NF4), as bitsandbytes does.

    Training from the new folder gives the same result and starts sooner; transformers with
    bitsandbytes opens it, too. Experts are kept in 16 bits for it, and are then trained so.
    """
    console = Terminal()
    settings = QuantConfig.model_validate(
        {"blocksize": int(blocksize), "double_quant": double_quant}
    )
    with _progress(console, "quantizing") as progress:
        quantize_folder(model_path, out, settings, experts=experts, progress=progress)
    console.print(f"quantized into {out}", highlight=False)


@click.command()
@run_argument
@click.option(
    "--gguf",
    "gguf_file",
    metavar="FILE",
    show_default="adapter.gguf, in RUN",
    help="The file to write.",
)
def export(run: str | None, model: str | None, adapter: str | None, gguf_file: str | None) -> None:
    """Write an adapter as a GGUF file, for llama.cpp's --lora.

    RUN is a run's folder, such as runs/first, or an adapter's.
    """
    named = located(run, model, adapter, needs_adapter=True)
    assert named.adapter is not None
    gguf_file = gguf_file or _beside(named.adapter, "adapter.gguf", "--gguf")
    if not gguf_file.endswith(".gguf"):
        raise ConfigError(f"--gguf {gguf_file!r} must end in .gguf")
    count = export_gguf(named.model, named.adapter, gguf_file)
    Terminal().print(f"{count} layers written to {gguf_file}", highlight=False)


def _beside(adapter: str, name: str, option: str) -> str:
    """A name in the folder of the adapter's run.

    Raises:
        ConfigError: If the adapter belongs to no run, or nothing can be written there.
    """
    if find_run(adapter) is None:
        raise ConfigError(f"{adapter} belongs to no run: say with {option} what to write")
    parent = Path(adapter).parent  # as the user has written it
    run = parent.parent if parent.name == "checkpoints" else parent
    if not os.access(run, os.W_OK):
        raise ConfigError(f"{run} cannot be written: say with {option} where the result goes")
    return str(run / name)


@contextmanager
def _progress(console: Console, verb: str) -> Iterator[Callable[[str], None]]:
    with console.status(verb) as status:
        yield lambda name: status.update(f"{verb} {name}")


def _drift(console: Console, opening: Opening, settings: Config, out: str) -> str:
    """Measures how the merged model's next tokens differ from those of base and adapter."""
    source = OpenedModel.open(opening.model)
    with Display(console) as display:
        trained = load_adapted(source, opening.adapter, settings, display)
        ids = _sample_ids(source, opening.adapter)
        before = trained.logits(ids)[0].astype(np.float64)
        plain = changed(settings, {"quant": {"scheme": "none"}})
        merged = load_adapted(OpenedModel.open(out), None, plain, display)
        after = merged.logits(ids)[0].astype(np.float64)
    apart = np.abs(after - before)
    p, q = _log_softmax(before), _log_softmax(after)
    divergence = float((np.exp(p) * (p - q)).sum(-1).mean())
    same = float((before.argmax(-1) == after.argmax(-1)).mean())
    base = _stored(source, settings)
    return (
        f"drift from base ({base}) and adapter, as trained, over {ids.size} tokens: "
        f"logits by {apart.mean():.3g} in the mean and {apart.max():.3g} "
        f"at most, KL divergence {divergence:.3g} nats a token, {100 * same:.0f} % of the "
        "likeliest tokens the same"
    )


def _stored(source: OpenedModel, settings: Config) -> str:
    quant = settings.quant
    scheme = source.pretrained.scheme(quant)
    if scheme == "none":
        return f"not quantized, {settings.train.compute_dtype}"
    if scheme != "nf4":
        return f"{scheme}, {settings.train.compute_dtype}"
    scales = "double" if quant.double_quant else "single"
    return f"NF4, blocks of {quant.blocksize}, {scales} scales, {settings.train.compute_dtype}"


def _sample_ids(source: OpenedModel, adapter: str | None) -> npt.NDArray[np.int64]:
    vocab = source.architecture.vocab_size
    try:
        ids = [i for i in tokenizer_for(source, adapter).encode(_SAMPLE) if i < vocab][
            :_SAMPLE_TOKENS
        ]
    except TokenizerError:
        ids = np.random.default_rng(0).integers(0, vocab, _SAMPLE_TOKENS).tolist()
    return np.array([ids])


def _log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = logits - logits.max(-1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result
