"""``worker`` and ``certificates``: machines that compute for runs elsewhere, and who may."""

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
    help="The worker's name, which no other one may have.",
)
@click.option("--certificates", help="Folder with ca.pem, cert.pem and key.pem.")
@click.option(
    "--model",
    type=FILE_OR_FOLDER,
    show_default="the run's",
    help="Folder or hub name of the base, here.",
)
@click.option(
    "--allow-plain-tcp",
    is_flag=True,
    help="Connect to tcp:// on another machine, although anyone on the network could then run "
    "code here.",
)
@click.option(
    "--memory-limit",
    type=SIZE,
    help="Memory of this machine, such as 16GiB, beyond which the worker restarts.",
)
@click.option(
    "--patience",
    default=PATIENCE,
    type=click.FloatRange(0),
    help="Seconds to wait for a scheduler that does not answer.",
)
def worker(**options: Any) -> None:
    """Compute on this machine's GPU for training runs elsewhere, through a Dask scheduler.

    SCHEDULER is its address, such as tls://192.168.1.5:8786. One worker takes one GPU. Ctrl-C ends
    it: what it was computing goes to others. If it crashes, it restarts by itself.
    """
    console = Terminal(soft_wrap=True)
    serve(WorkerOptions(**options), console.print)


@click.command()
@click.argument("folder", type=click.Path())
@click.option(
    "--days", default=365, type=click.IntRange(1, 3650), help="How long the certificate is valid."
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
        f"`scp -rp {made.folder} MACHINE:`, and keep key.pem secret"
    )
