"""``worker`` and ``certificates``: a cluster's machines, and how they trust each other."""

from __future__ import annotations

from typing import Any

import click

from qlora_wgpu.cli._options import FILE_OR_FOLDER, SIZE, gpu_option
from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.cluster.security import make_certificates
from qlora_wgpu.cluster.serving import PATIENCE, WorkerOptions, serve


@click.command()
@click.argument("scheduler")
@gpu_option("The GPU to compute on: its index or a part of its name, as doctor lists them.")
@click.option(
    "--name",
    show_default="the machine's name, and --gpu",
    help="The worker's name, unique in the cluster.",
)
@click.option("--certificates", metavar="FOLDER", help="Folder with ca.pem, cert.pem and key.pem.")
@click.option(
    "--model",
    type=FILE_OR_FOLDER,
    show_default="the run's",
    help="Folder or hub name of the base on this machine.",
)
@click.option(
    "--allow-plain-tcp",
    is_flag=True,
    help="Allow tcp:// to another machine, which lets anyone on the network run code here.",
)
@click.option(
    "--memory-limit",
    type=SIZE,
    help="Host memory, such as 16GiB, beyond which the worker restarts.",
)
@click.option(
    "--patience",
    default=PATIENCE,
    type=click.FloatRange(0),
    help="Seconds to wait for a scheduler that does not respond.",
)
def worker(**options: Any) -> None:
    """Compute on this machine's GPU for runs on other machines.

    SCHEDULER is the address of a Dask scheduler, such as tls://192.168.1.5:8786. A worker uses one
    GPU. After Ctrl-C, other workers repeat its current work. If it crashes, it restarts by itself.
    """
    console = Terminal(soft_wrap=True)
    serve(WorkerOptions(**options), console.print)


@click.command()
@click.argument("folder", type=click.Path())
@click.option(
    "--days", default=365, type=click.IntRange(1, 3650), help="Validity of the certificate in days."
)
def certificates(folder: str, days: int) -> None:
    """Create the certificate that a cluster shares, in FOLDER.

    To add a machine, copy FOLDER to it. Whoever has key.pem can run code on every machine of the
    cluster. Existing files are never overwritten.
    """
    console = Terminal(soft_wrap=True)
    made = make_certificates(folder, days)
    console.print(
        f"{made.folder} has ca.pem, cert.pem and key.pem, valid until {made.until:%Y-%m-%d}; copy "
        f"the folder to each machine of the cluster, for example with `scp -rp {made.folder} "
        "MACHINE:`, and keep key.pem secret"
    )
