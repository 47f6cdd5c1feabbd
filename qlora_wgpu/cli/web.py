"""``web``: a run's model as a page that trains it in a browser."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Literal

import click
from rich.console import Console

from qlora_wgpu.cli._model import MOST_PORTS, read_settings, whole_number
from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.limits import RANK, TOKENS_OF_A_ROW
from qlora_wgpu.presence import is_file
from qlora_wgpu.runs.web import SiteServer, write_page
from qlora_wgpu.web import MANIFEST, Site, SiteOptions


@click.command()
@click.argument("target", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--out", help="Folder to write, for any web server.")
@click.option(
    "--ranks", metavar="N,...", show_default="the run's", help="Ranks of the adapter to offer."
)
@click.option(
    "--lengths",
    metavar="N,...",
    show_default="all that the run would use",
    help="Lengths that rows are padded to; the longest is what they are cut to.",
)
@click.option("--with-data", is_flag=True, help="Add data.train to the page, as an example to try.")
@click.option(
    "--kernels",
    type=click.Choice(["gpu", "cpu"]),
    default="gpu",
    show_default=True,
    help="Cut for browsers on GPUs, or on software GPUs.",
)
@click.option("--serve", is_flag=True, help="Serve it on this machine's loopback address.")
@click.option("--port", default="0", metavar="N", help="Port to serve it on.", show_default="any")
def web(
    target: str,
    overrides: tuple[str, ...],
    out: str | None,
    ranks: str | None,
    lengths: str | None,
    with_data: bool,
    kernels: Literal["gpu", "cpu"],
    serve: bool,
    port: str,
) -> None:
    """Write a page that trains a run's model in a browser, on a file that is dropped there.

    TARGET is a run's YAML or folder (with overrides, as for train), or a site that was written
    before, to be served. Nothing that is dropped leaves the machine, and no Python is needed there.
    """
    console = Terminal()
    number = 0 if port == "0" else whole_number("--port", port, MOST_PORTS)
    if is_file(Path(target) / MANIFEST):
        if not serve:
            raise ConfigError(f"{target} is written already: serve it with --serve")
        _serve(console, target, number)
        return
    if out is None:
        raise ConfigError("--out is missing: name the folder to write, such as --out site")
    options = SiteOptions(
        ranks=_numbers("--ranks", ranks, RANK),
        buckets=_lengths(lengths),
        kernels=kernels,
    )
    settings = read_settings(target, overrides)
    with console.status("writing") as status:
        site = write_page(
            settings, out, options, with_data=with_data,
            progress=lambda name: status.update(f"writing {name}"),
        )  # fmt: skip
    _tell(console, site)
    if serve:
        _serve(console, out, number)


def _numbers(option: str, text: str | None, most: int) -> tuple[int, ...]:
    parts = text.split(",") if text else []
    return tuple(dict.fromkeys(whole_number(option, part.strip(), most) for part in parts))


def _lengths(text: str | None) -> tuple[int, ...]:
    found = _numbers("--lengths", text, TOKENS_OF_A_ROW)
    if found and max(found) < 2:
        raise ConfigError(
            "--lengths must have one of 2 or more: in a row of one token is nothing to learn"
        )
    return found


def _tell(console: Console, site: Site) -> None:
    console.print(
        f"{site.folder}: {site.nbytes / 2**20:,.1f} MiB, of which weights "
        f"{site.weight_bytes / 2**20:,.1f} MiB",
        highlight=False,
    )
    for rank, lengths in site.memory.items():
        shown = ", ".join(f"{n}: {nbytes / 2**20:,.0f}" for n, nbytes in lengths.items())
        console.print(f"rank {rank}, MiB of a GPU by length of rows: {shown}", highlight=False)


def _serve(console: Console, folder: str, port: int) -> None:
    with SiteServer(folder, port) as server:
        console.print(
            f"{server.url} shows it on this machine until Ctrl-C", highlight=False, soft_wrap=True
        )
        with suppress(KeyboardInterrupt):
            server.serve_forever()
