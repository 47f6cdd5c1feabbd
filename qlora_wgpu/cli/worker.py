"""``worker``: this machine's GPU for runs on other machines."""

from __future__ import annotations

import click

from qlora_wgpu.cli._model import gpu_option, read_bytes
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
@click.option("--model", show_default="the run's", help="Folder or hub name of the base, here.")
@click.option(
    "--allow-plain-tcp",
    is_flag=True,
    help="Connect to tcp:// on another machine, although anyone on the network could then run "
    "code here.",
)
@click.option(
    "--memory-limit",
    help="Memory of this machine, such as 16GiB, beyond which the worker restarts.",
)
@click.option(
    "--patience",
    default=PATIENCE,
    show_default=True,
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
    memory_limit: str | None,
    patience: float,
) -> None:
    """Compute on this machine's GPU for training runs elsewhere, through a Dask scheduler.

    SCHEDULER is its address, such as tls://192.168.1.5:8786. One worker takes one GPU. Ctrl-C ends
    it: what it was computing goes to others. If it crashes, it restarts by itself.
    """
    console = Terminal(soft_wrap=True)
    limit = None if memory_limit is None else read_bytes("--memory-limit", memory_limit)
    service = Service(scheduler, gpu, name, certificates, model, allow_plain_tcp, limit, patience)
    serve(service, lambda text: console.print(text, highlight=False))
