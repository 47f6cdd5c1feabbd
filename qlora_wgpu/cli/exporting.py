"""``merge``, ``quantize`` and ``export``: what was trained, for other programs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import click

from qlora_wgpu.cli._display import Display
from qlora_wgpu.cli._opening import ModelOptions, opening_options
from qlora_wgpu.cli._options import FILE_OR_FOLDER
from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.config import Config, QuantConfig
from qlora_wgpu.config.as_trained import find_run
from qlora_wgpu.config.paths import run_around
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.exporting import merge as merge_adapter
from qlora_wgpu.exporting import quantize_folder
from qlora_wgpu.exporting.gguf_tensors import FILE_TYPES
from qlora_wgpu.runs import OpenedModel
from qlora_wgpu.runs.exporting import (
    export_adapter,
    export_model,
    merge_drift,
    modelfile_of,
)
from qlora_wgpu.shell_words import shell_word

_base_option = click.option(
    "--base",
    default="original",
    type=click.Choice(["original", "dequantized"]),
    help="Add the adapter to the stored weights, or to what they were in training, after NF4.",
)
_BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
Base = Literal["original", "dequantized"]


@click.command()
@opening_options(needs_adapter=True)
@click.option(
    "--out", type=FILE_OR_FOLDER, show_default="merged, in RUN", help="The new model's folder."
)
@_base_option
@click.option(
    "--check/--no-check",
    default=True,
    help="Whether to measure how far the merged model's logits drift.",
)
def merge(opening: ModelOptions, out: str | None, base: Base, check: bool) -> None:
    """Merge an adapter into its base model.

    RUN is a run's folder, such as runs/first, or an adapter's.

    The result is a model folder in the base's own type of floats, mostly one of 16 bits, which
    transformers, vLLM and llama.cpp's converter load. How the base was quantized is known from the
    config.yaml of the adapter's run.
    """
    console = Terminal()
    with Display(console) as display:
        settings = opening.settings(display)
    assert opening.adapter is not None
    out = out or path_in_run(opening.adapter, "merged", "--out")
    with _progress(console, "merging") as progress:
        merge_adapter(
            opening.model,
            opening.adapter,
            out,
            base=base,
            quant=settings.quant,
            progress=progress,
        )
    console.print(f"merged into {out}")
    if check:
        console.print(_drift(console, opening, settings, out))


@click.command()
@click.option(
    "--model",
    "model_path",
    required=True,
    type=FILE_OR_FOLDER,
    help="Folder or hub name of the model.",
)
@click.option("--out", required=True, type=FILE_OR_FOLDER, help="The new folder.")
@click.option(
    "--blocksize",
    default=64,
    type=click.Choice(_BLOCKSIZES),
    help="Number of weights that share a scale.",
)
@click.option(
    "--double-quant/--no-double-quant", default=True, help="Store the scales in 8 bits, too."
)
@click.option(
    "--experts/--no-experts",
    default=False,
    help="Quantize experts, too: a quarter of their size, but transformers cannot open it.",
)
def quantize(model_path: str, out: str, blocksize: int, double_quant: bool, experts: bool) -> None:
    """Write a model with its linear layers in 4 bits (NF4), as bitsandbytes does.

    Training from the new folder gives the same result and starts sooner; transformers with
    bitsandbytes opens it, too. For that, experts stay in 16 bits, in training as well.
    """
    console = Terminal()
    settings = QuantConfig.model_validate({"blocksize": blocksize, "double_quant": double_quant})
    with _progress(console, "quantizing") as progress:
        quantize_folder(model_path, out, settings, experts=experts, progress=progress)
    console.print(f"quantized into {out}")


@click.command()
@opening_options(needs_adapter=True)
@click.option(
    "--gguf",
    "gguf_file",
    type=FILE_OR_FOLDER,
    metavar="FILE",
    show_default="model.gguf, or adapter.gguf, in RUN",
    help="The file to write.",
)
@click.option(
    "--type",
    "type_name",
    show_default="floats, as the base's",
    help=f"What matrices are stored as: {', '.join(FILE_TYPES)}.",
)
@click.option("--adapter-only", is_flag=True, help="The adapter alone, for llama.cpp's --lora.")
@_base_option
@click.option(
    "--check/--no-check",
    default=True,
    help="Whether to measure how far the file's logits drift, and to keep none that is wrong.",
)
def export(
    opening: ModelOptions,
    gguf_file: str | None,
    type_name: str | None,
    adapter_only: bool,
    base: Base,
    check: bool,
) -> None:
    """Write what was trained as a GGUF file, for llama.cpp, Ollama and LM Studio.

    RUN is a run's folder, such as runs/first, or an adapter's.

    The file holds the whole model, the adapter merged into its base, and the tokenizer. Before it
    gets its name it is read back, and its logits on the run's own data are compared with those of
    base and adapter.
    """
    console = Terminal()
    assert opening.adapter is not None
    name = "adapter.gguf" if adapter_only else "model.gguf"
    gguf_file = gguf_file or path_in_run(opening.adapter, name, "--gguf")
    if adapter_only:
        if type_name is not None:
            raise ConfigError(
                "--type is for whole models, and --adapter-only writes float32: leave one out"
            )
        count = export_adapter(opening.model, opening.adapter, gguf_file)
        console.print(f"{count} layers written to {gguf_file}")
        return
    with Display(console) as display, _progress(console, "writing") as progress:
        settings = opening.settings(display)
        done = export_model(
            opening.model,
            opening.adapter,
            gguf_file,
            type_name=type_name,
            base=base,
            quant=settings.quant,
            settings=settings if check else None,
            observer=display,
            progress=progress,
        )
    for note in done.notes:
        console.note(note)
    size = f"{done.nbytes / 1e9:.2f} GB" if done.nbytes >= 1e7 else f"{done.nbytes:,} bytes"
    console.print(f"{size} in {done.type_name} written to {done.path}")
    modelfile = shell_word(str(modelfile_of(done.path)))
    console.print(f"for Ollama: ollama create NAME -f {modelfile}")
    if done.drift is not None:
        console.print(f"drift from base and adapter, as trained, {done.drift}")


def path_in_run(adapter: str, name: str, option: str) -> str:
    """A name in the folder of the adapter's run."""
    if find_run(adapter) is None:
        raise ConfigError(f"{adapter} belongs to no run: say with {option} what to write")
    run = run_around(Path(adapter))  # as the user has written it
    if not os.access(run, os.W_OK):
        raise ConfigError(f"{run} cannot be written: say with {option} where the result goes")
    return str(run / name)


@contextmanager
def _progress(console: Terminal, verb: str) -> Iterator[Callable[[str], None]]:
    with console.status(verb) as status:
        yield lambda name: status.update(f"{verb} {name}")


def _drift(console: Terminal, opening: ModelOptions, settings: Config, out: str) -> str:
    """Measures how the merged model's next tokens differ from those of base and adapter."""
    source = OpenedModel.open(opening.model)
    assert opening.adapter is not None
    with Display(console) as display:
        drift = merge_drift(source, opening.adapter, Path(out), settings, display)
    base = _stored(source, settings)
    return f"drift from base ({base}) and adapter, as trained, {drift}"


def _stored(source: OpenedModel, settings: Config) -> str:
    quant = settings.quant
    scheme = source.pretrained.scheme(quant)
    if scheme == "none":
        return f"not quantized, {settings.train.compute_dtype}"
    if scheme != "nf4":
        return f"{scheme}, {settings.train.compute_dtype}"
    scales = "double" if quant.double_quant else "single"
    return f"NF4, blocks of {quant.blocksize}, {scales} scales, {settings.train.compute_dtype}"
