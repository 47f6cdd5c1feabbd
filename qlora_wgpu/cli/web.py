"""``web``: a run's model as a page that trains it in a browser."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal

import click
from rich.console import Console

from qlora_wgpu.cli._options import (
    FILE_OR_FOLDER,
    PORT_OR_ANY,
    ReadBy,
    overrides_argument,
    whole_numbers,
)
from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.files import is_file
from qlora_wgpu.limits import RANK, TOKENS_OF_A_ROW
from qlora_wgpu.runs.settings import as_config
from qlora_wgpu.runs.web import SiteServer, write_page
from qlora_wgpu.web import MANIFEST, Site, SiteOptions


def _lengths(option: str, text: str) -> tuple[int, ...]:
    found = whole_numbers(option, text, TOKENS_OF_A_ROW)
    if found and max(found) < 2:
        raise ConfigError(
            f"{option} must have one of 2 or more: in a row of one token is nothing to learn"
        )
    return found


@click.command()
@click.argument("target", type=click.Path())
@overrides_argument
@click.option("--out", type=FILE_OR_FOLDER, help="Folder to write, for any web server.")
@click.option(
    "--ranks",
    type=ReadBy("N,...", partial(whole_numbers, most=RANK)),
    show_default="the run's",
    help="Ranks of the adapter to offer.",
)
@click.option(
    "--lengths",
    type=ReadBy("N,...", _lengths),
    show_default="all that the run would use",
    help="Lengths that rows are padded to; the longest is what they are cut to.",
)
@click.option("--with-data", is_flag=True, help="Add data.train to the page, as an example to try.")
@click.option(
    "--kernels",
    type=click.Choice(["gpu", "cpu"]),
    default="gpu",
    help="Cut for browsers on GPUs, or on software GPUs.",
)
@click.option("--serve", is_flag=True, help="Serve it on this machine's loopback address.")
@click.option("--port", type=PORT_OR_ANY, help="Port to serve it on.", show_default="any")
def web(
    target: str,
    overrides: tuple[str, ...],
    out: str | None,
    ranks: tuple[int, ...] | None,
    lengths: tuple[int, ...] | None,
    with_data: bool,
    kernels: Literal["gpu", "cpu"],
    serve: bool,
    port: int | None,
) -> None:
    """Write a page that trains a run's model in a browser, on a file that is dropped there.

    TARGET is a run's YAML or folder (with overrides, as for train), or a site that was written
    before, to be served. Nothing that is dropped leaves the machine, and no Python is needed there.
    """
    console = Terminal()
    if is_file(Path(target) / MANIFEST):
        if not serve:
            raise ConfigError(f"{target} is written already: serve it with --serve")
        _serve(console, target, port or 0)
        return
    if out is None:
        raise ConfigError("--out is missing: name the folder to write, such as --out site")
    options = SiteOptions(ranks=ranks or (), buckets=lengths or (), kernels=kernels)
    settings = as_config(target, overrides)
    with console.status("writing") as status:
        site = write_page(
            settings, out, options, with_data=with_data,
            progress=lambda name: status.update(f"writing {name}")
        )  # fmt: skip
    _tell(console, site)
    if serve:
        _serve(console, out, port or 0)


def _tell(console: Console, site: Site) -> None:
    console.print(
        f"{site.folder}: {site.nbytes / 2**20:,.1f} MiB, of which weights "
        f"{site.weight_bytes / 2**20:,.1f} MiB"
    )
    for rank, lengths in site.memory.items():
        shown = ", ".join(f"{n}: {nbytes / 2**20:,.0f}" for n, nbytes in lengths.items())
        console.print(f"rank {rank}, MiB of a GPU by length of rows: {shown}")


def _serve(console: Console, folder: str, port: int) -> None:
    with SiteServer(folder, port) as server:
        console.print(f"{server.url} shows it on this machine until Ctrl-C", soft_wrap=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
