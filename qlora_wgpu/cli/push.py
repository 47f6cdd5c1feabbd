"""``push``: what was trained to the Hugging Face hub."""

from __future__ import annotations

import sys

import click

from qlora_wgpu.checkpoint.hub import name_on_hub
from qlora_wgpu.cli._opening import located
from qlora_wgpu.cli._options import FILE_OR_FOLDER
from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.runs.hub_upload import UploadBundle
from qlora_wgpu.runs.hub_upload import push as push_to_hub
from qlora_wgpu.runs.resolve import base_of


@click.command()
@click.argument("run", type=click.Path())
@click.argument("name")
@click.option("--base", help="The base's name on the hub, if it was trained on a folder.")
@click.option("--merged", metavar="FOLDER", help="Send this merged model in place of the adapter.")
@click.option(
    "--gguf",
    type=FILE_OR_FOLDER,
    metavar="FILE",
    help="Send this GGUF file in place of the adapter.",
)
@click.option(
    "--private/--public",
    default=True,
    help="Whether a new repository is visible to its owner alone or to everybody.",
)
@click.option("--yes", is_flag=True, help="Send it without asking.")
def push(
    run: str,
    name: str,
    base: str | None,
    merged: str | None,
    gguf: str | None,
    private: bool,
    yes: bool,
) -> None:
    """Send what a run has trained to the Hugging Face hub, as NAME (owner/name).

    RUN is a run's folder, such as runs/first, or an adapter's. What is sent gets a model card,
    README.md, made of the run; an adapter's is written beside it if there is none: edit it before
    or afterwards; the licence is yours to fill in. You are asked before anything leaves this
    machine. Your token goes to the hub alone (`hf auth login`, or HF_TOKEN).
    """
    console = Terminal()
    adapter = located(run, None, None, needs_adapter=True).adapter
    assert adapter is not None
    if base is None and name_on_hub(base_of(adapter)) is None:
        console.print(
            f"note: it was trained on the folder {base_of(adapter)}, which nobody else has: name "
            "the same model on the hub with --base",
            style="yellow",
        )

    def agree(parcel: UploadBundle) -> bool:
        who = "you alone" if parcel.private else "everybody"
        console.print(f"{parcel.name} on the hub, seen by {who} where it is new:")
        for file, content in parcel.files.items():
            size = len(content) if isinstance(content, bytes) else content.stat().st_size
            console.print(f"  {file}  {size:,} bytes", soft_wrap=True)
        return yes or _asked(f"Send {parcel.nbytes / 1e6:,.1f} MB?")

    page = push_to_hub(
        adapter, name, base=base, private=private, merged=merged, gguf=gguf, agree=agree
    )
    if page is None:
        console.print("nothing was sent")
        return
    console.print(f"sent to {page}", soft_wrap=True)


def _asked(question: str) -> bool:
    """What the user says."""
    if not sys.stdin.isatty():
        raise ConfigError(
            "push asks before anything leaves this machine, and nobody is at the terminal: add "
            "--yes if it is to be sent"
        )
    return click.confirm(question)
