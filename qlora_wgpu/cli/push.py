"""``push``: an adapter to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

import click

from qlora_wgpu.cli._model import located
from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.runs.locating import base_of
from qlora_wgpu.runs.pushing import name_on_hub
from qlora_wgpu.runs.pushing import push as push_adapter


@click.command()
@click.argument("run", type=click.Path())
@click.argument("name")
@click.option("--base", help="The base's name on the hub, if it was trained on a folder.")
@click.option("--private", is_flag=True, help="Let the owner alone see a new repository.")
def push(run: str, name: str, base: str | None, private: bool) -> None:
    """Send what a run has trained to the Hugging Face hub, as NAME (owner/name).

    RUN is a run's folder, such as runs/first, or an adapter's. The adapter's folder gets a model
    card, README.md, if it has none: edit it before or afterwards; the licence is yours to fill in.
    Your token goes to the hub alone (`hf auth login`, or HF_TOKEN).
    """
    console = Terminal()
    adapter = located(run, None, None, needs_adapter=True).adapter
    assert adapter is not None
    if base is None and name_on_hub(base_of(adapter)) is None:
        console.print(
            f"note: it was trained on the folder {base_of(adapter)}, which nobody else has: name "
            "the same model on the hub with --base",
            style="yellow",
            highlight=False,
        )
    with console.status(f"sending {Path(adapter)}"):
        page = push_adapter(adapter, name, base=base, private=private)
    console.print(f"sent to {page}", highlight=False, soft_wrap=True)
