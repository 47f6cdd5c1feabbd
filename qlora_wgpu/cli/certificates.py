"""``certificates``: what lets machines into one cluster, and nobody else."""

from __future__ import annotations

import click

from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.cluster.security import make_certificates


@click.command()
@click.argument("folder", type=click.Path())
@click.option(
    "--days",
    default=365,
    show_default=True,
    type=click.IntRange(1, 3650),
    help="How long the certificate is valid.",
)
def certificates(folder: str, days: int) -> None:
    """Make the certificate that the machines of a cluster share, in FOLDER.

    A machine is added by copying FOLDER to it. Whoever has key.pem can run code on every machine
    of the cluster. Nothing is ever overwritten.
    """
    console = Terminal(soft_wrap=True)
    made = make_certificates(folder, days)
    console.print(
        f"{made.folder} holds ca.pem, cert.pem and key.pem, valid until {made.until:%Y-%m-%d}; "
        "copy it to each machine of the cluster as it is, such as with "
        f"`scp -rp {made.folder} MACHINE:`, and keep key.pem secret",
        highlight=False,
    )
