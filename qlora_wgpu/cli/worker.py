"""``worker``: this machine's GPU for runs on other machines."""

from __future__ import annotations

import click

from qlora_wgpu.cli._options import FILE_OR_FOLDER, SIZE, gpu_option
from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.cluster.serving import PATIENCE, Service, serve


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
def worker(
    scheduler: str,
    gpu: str,
    name: str | None,
    certificates: str | None,
    model: str | None,
    allow_plain_tcp: bool,
    memory_limit: int | None,
    patience: float,
) -> None:
    """Compute on this machine's GPU for training runs elsewhere, through a Dask scheduler.

    SCHEDULER is its address, such as tls://192.168.1.5:8786. One worker takes one GPU. Ctrl-C ends
    it: what it was computing goes to others. If it crashes, it restarts by itself.
    """
    console = Terminal(soft_wrap=True)
    service = Service(
        scheduler, gpu, name, certificates, model, allow_plain_tcp, memory_limit, patience
    )
    serve(service, lambda text: console.print(text))
