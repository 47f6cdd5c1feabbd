"""``web``: a web page that fine-tunes a run's model in the browser."""

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
    ParsedType,
    overrides_argument,
    positive_integers,
)
from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.files import is_file
from qlora_wgpu.limits import RANK, TOKENS_OF_A_ROW
from qlora_wgpu.runs.settings import as_config
from qlora_wgpu.runs.web import SiteServer, write_page
from qlora_wgpu.web import MANIFEST, Site, SiteOptions


def _lengths(option: str, text: str) -> tuple[int, ...]:
    found = positive_integers(option, text, TOKENS_OF_A_ROW)
    if found and max(found) < 2:
        raise ConfigError(f"{option} must include 2 or more: a row of one token has no label")
    return found


@click.command()
@click.argument("target", type=click.Path())
@overrides_argument
@click.option("--out", type=FILE_OR_FOLDER, help="Folder to write, which any web server can serve.")
@click.option(
    "--ranks",
    type=ParsedType("N,...", partial(positive_integers, maximum=RANK)),
    show_default="the run's",
    help="Adapter ranks to offer.",
)
@click.option(
    "--lengths",
    type=ParsedType("N,...", _lengths),
    show_default="the run's",
    help="Lengths to pad rows to; longer rows are truncated to the largest.",
)
@click.option("--with-data", is_flag=True, help="Include data.train as an example.")
@click.option(
    "--kernels",
    type=click.Choice(["gpu", "cpu"]),
    default="gpu",
    help="Tilings for browsers on GPUs, or on software GPUs.",
)
@click.option("--serve", is_flag=True, help="Serve the page on this machine's loopback address.")
@click.option("--port", type=PORT_OR_ANY, help="Port to serve on.", show_default="any")
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
    """Build a web page that fine-tunes a run's model in a browser.

    TARGET is a run's YAML or folder (with overrides, as for train), or an existing site to serve.
    Visitors drop in a data file, which never leaves their machine; they need no Python.
    """
    console = Terminal()
    if is_file(Path(target) / MANIFEST):
        if not serve:
            raise ConfigError(f"{target} is a site already: add --serve to serve it")
        _serve(console, target, port or 0)
        return
    if out is None:
        raise ConfigError("--out is required: pass the folder to write, such as --out site")
    options = SiteOptions(ranks=ranks or (), buckets=lengths or (), kernels=kernels)
    settings = as_config(target, overrides)
    with console.status("writing") as status:
        site = write_page(
            settings, out, options, with_data=with_data,
            progress=lambda name: status.update(f"writing {name}")
        )  # fmt: skip
    _show_site(console, site)
    if serve:
        _serve(console, out, port or 0)


def _show_site(console: Console, site: Site) -> None:
    console.print(
        f"{site.folder}: {site.nbytes / 2**20:,.1f} MiB, including "
        f"{site.weight_bytes / 2**20:,.1f} MiB of weights"
    )
    for rank, lengths in site.memory.items():
        shown = ", ".join(f"{n}: {nbytes / 2**20:,.0f}" for n, nbytes in lengths.items())
        console.print(f"rank {rank}, MiB of GPU memory by row length: {shown}")


def _serve(console: Console, folder: str, port: int) -> None:
    with SiteServer(folder, port) as server:
        console.print(f"serving at {server.url} (Ctrl-C to stop)", soft_wrap=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
