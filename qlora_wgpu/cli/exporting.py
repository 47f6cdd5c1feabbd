"""``merge``, ``quantize``, ``export`` and ``push``: models and adapters for other programs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from qlora_wgpu.checkpoint.hub import name_on_hub
from qlora_wgpu.cli._display import Display
from qlora_wgpu.cli._opening import ModelOptions, located, opening_options
from qlora_wgpu.cli._options import FILE_OR_FOLDER
from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.config import Config, QuantConfig
from qlora_wgpu.config.loading import find_run
from qlora_wgpu.config.paths import run_around
from qlora_wgpu.errors import ConfigError, shell_word
from qlora_wgpu.exporting import merge as merge_adapter
from qlora_wgpu.exporting import quantize_folder
from qlora_wgpu.exporting.gguf_tensors import FILE_TYPES
from qlora_wgpu.exporting.merge import Base
from qlora_wgpu.lora.scoring_files import is_scored_adapter
from qlora_wgpu.quant import BLOCKSIZES
from qlora_wgpu.runs import OpenedModel
from qlora_wgpu.runs.exporting import export_adapter, export_model, merge_drift, modelfile_of
from qlora_wgpu.runs.hub_upload import UploadBundle
from qlora_wgpu.runs.hub_upload import push as push_to_hub
from qlora_wgpu.runs.resolve import base_of

_base_option = click.option(
    "--base",
    default="original",
    type=click.Choice(["original", "dequantized"]),
    help="Merge into the original weights, or into the dequantized NF4 weights used in training.",
)

# ---- merge ---------------------------------------------------------------------------------------


@click.command()
@opening_options(needs_adapter=True)
@click.option("--out", type=FILE_OR_FOLDER, show_default="merged, in RUN", help="Output folder.")
@_base_option
@click.option(
    "--check/--no-check",
    default=True,
    help="Compare a merged language model's logits with those of base and adapter.",
)
def merge(opening: ModelOptions, out: str | None, base: Base, check: bool) -> None:
    """Merge an adapter into its base model.

    RUN is the folder of a run, such as runs/first, or of an adapter.

    The result is a model folder in the base's data type, usually a 16-bit one, for transformers,
    vLLM and llama.cpp's converter. The config.yaml of the adapter's run says how the base was
    quantized.
    """
    console = Terminal()
    with Display(console) as display:
        settings = opening.settings(display)
    assert opening.adapter is not None
    out = out or path_in_run(opening.adapter, "merged", "--out")
    with _progress(console, "merging") as progress:
        merge_adapter(
            opening.model, opening.adapter, out, base=base, quant=settings.quant, progress=progress
        )
    console.print(f"merged into {out}")
    if check and not is_scored_adapter(opening.adapter):
        console.print(_drift(console, opening, settings, out))


def _drift(console: Terminal, opening: ModelOptions, settings: Config, out: str) -> str:
    """How the merged model's predictions differ from those of base and adapter."""
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


# ---- quantize ------------------------------------------------------------------------------------


@click.command()
@click.option(
    "--model",
    "model_path",
    required=True,
    type=FILE_OR_FOLDER,
    help="Folder or hub name of the model.",
)
@click.option("--out", required=True, type=FILE_OR_FOLDER, help="Output folder.")
@click.option("--blocksize", default=64, type=click.Choice(BLOCKSIZES), help="Weights per scale.")
@click.option(
    "--double-quant/--no-double-quant", default=True, help="Quantize the scales to 8 bits."
)
@click.option(
    "--experts/--no-experts",
    default=False,
    help="Quantize experts, too: a quarter of the size, but transformers cannot load it.",
)
def quantize(model_path: str, out: str, blocksize: int, double_quant: bool, experts: bool) -> None:
    """Quantize a model's linear layers to NF4, like bitsandbytes.

    Training on the new folder gives the same result and starts faster; transformers with
    bitsandbytes loads it, too. Experts stay in 16 bits, also in training, since transformers cannot
    load quantized ones.
    """
    console = Terminal()
    settings = QuantConfig.model_validate({"blocksize": blocksize, "double_quant": double_quant})
    with _progress(console, "quantizing") as progress:
        quantize_folder(model_path, out, settings, experts=experts, progress=progress)
    console.print(f"quantized into {out}")


# ---- export --------------------------------------------------------------------------------------


@click.command()
@opening_options(needs_adapter=True)
@click.option(
    "--gguf",
    "gguf_file",
    type=FILE_OR_FOLDER,
    metavar="FILE",
    show_default="model.gguf, or adapter.gguf, in RUN",
    help="Output file.",
)
@click.option(
    "--type",
    "type_name",
    show_default="the base's float type",
    help=f"Type of matrices: {', '.join(FILE_TYPES)}.",
)
@click.option(
    "--adapter-only", is_flag=True, help="Export only the adapter, for llama.cpp's --lora."
)
@_base_option
@click.option(
    "--check/--no-check",
    default=True,
    help="Compare the file's logits with those of base and adapter, and delete it if it is wrong.",
)
def export(
    opening: ModelOptions, gguf_file: str | None, type_name: str | None, adapter_only: bool,
    base: Base, check: bool,
) -> None:  # fmt: skip
    """Export a run's model as GGUF, for llama.cpp and Ollama.

    RUN is the folder of a run, such as runs/first, or of an adapter.

    The file has the whole model, with the adapter merged into its base, and the tokenizer; LM
    Studio loads it, too. Before it gets its name, it is read back, and its logits on the run's data
    are compared with those of base and adapter.
    """
    console = Terminal()
    assert opening.adapter is not None
    name = "adapter.gguf" if adapter_only else "model.gguf"
    gguf_file = gguf_file or path_in_run(opening.adapter, name, "--gguf")
    if adapter_only:
        if type_name is not None:
            raise ConfigError(
                "--type and --adapter-only are mutually exclusive: an adapter is written in float32"
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


# ---- push ----------------------------------------------------------------------------------------


@click.command()
@click.argument("run", type=click.Path())
@click.argument("name")
@click.option("--base", help="Hub name of the base, if the run's is a local folder.")
@click.option("--merged", metavar="FOLDER", help="Upload this merged model instead of the adapter.")
@click.option(
    "--gguf",
    type=FILE_OR_FOLDER,
    metavar="FILE",
    help="Upload this GGUF file instead of the adapter.",
)
@click.option("--private/--public", default=True, help="Visibility of a new repository.")
@click.option("--yes", is_flag=True, help="Upload without asking.")
def push(
    run: str, name: str, base: str | None, merged: str | None, gguf: str | None, private: bool,
    yes: bool,
) -> None:  # fmt: skip
    """Upload a run's adapter to the Hugging Face Hub as NAME.

    RUN is the folder of a run, such as runs/first, or of an adapter. NAME is OWNER/NAME. A model
    card, README.md, is generated from the run, and written next to an adapter that has none: you
    can edit it before or after uploading, and must add the license. You are asked before anything
    is uploaded. Your token (`hf auth login`, or HF_TOKEN) is sent only to the Hub.
    """
    console = Terminal()
    adapter = located(run, None, None, needs_adapter=True).adapter
    assert adapter is not None
    if base is None and name_on_hub(base_of(adapter)) is None:
        console.note(
            f"the base is the local folder {base_of(adapter)}, which nobody else has: set its name "
            "on the Hub with --base"
        )

    def agree(bundle: UploadBundle) -> bool:
        visibility = "private" if bundle.private else "public"
        console.print(f"{bundle.name} on the Hub ({visibility} if it is new):")
        for file, content in bundle.files.items():
            size = len(content) if isinstance(content, bytes) else content.stat().st_size
            console.print(f"  {file}  {size:,} bytes", soft_wrap=True)
        return yes or _confirm(f"Upload {bundle.nbytes / 1e6:,.1f} MB?")

    page = push_to_hub(
        adapter, name, base=base, private=private, merged=merged, gguf=gguf, agree=agree
    )
    if page is None:
        console.print("nothing was uploaded")
        return
    console.print(f"uploaded to {page}", soft_wrap=True)


def _confirm(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(
            "push asks before it uploads, but stdin is not a terminal: add --yes to upload"
        )
    return click.confirm(question)


# ---- shared --------------------------------------------------------------------------------------


def path_in_run(adapter: str, name: str, option: str) -> str:
    """A path in the folder of the adapter's run."""
    if find_run(adapter) is None:
        raise ConfigError(f"{adapter} is not in a run's folder: {option} is required")
    run = run_around(Path(adapter))  # as the user wrote it
    if not os.access(run, os.W_OK):
        raise ConfigError(f"{run} cannot be written: set another path with {option}")
    return str(run / name)


@contextmanager
def _progress(console: Terminal, verb: str) -> Iterator[Callable[[str], None]]:
    with console.status(verb) as status:
        yield lambda name: status.update(f"{verb} {name}")
