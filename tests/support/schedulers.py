"""A real Dask scheduler, in a process of its own."""

import socket
import subprocess
import sys
from contextlib import closing, contextmanager

_START = "from distributed.cli.dask_scheduler import main; main()"


@contextmanager
def free_port():
    """A port that nobody else is given meanwhile, and that who is told of it can listen at."""
    with closing(socket.socket()) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@contextmanager
def scheduler(folder=None, port=None):
    """Starts one on the loopback address; gives its address.

    Args:
        folder: Of its certificates; None for plain TCP.
        port: None for any that is free.
    """
    if port is None:
        with free_port() as port, scheduler(folder, port) as address:
            yield address
        return
    protocol = "tcp" if folder is None else "tls"
    address = f"{protocol}://127.0.0.1:{port}"
    options = ["--host", address, "--no-dashboard", "--dashboard-address", "127.0.0.1:0"]
    if folder is not None:
        names = {"--tls-ca-file": "ca.pem", "--tls-cert": "cert.pem", "--tls-key": "key.pem"}
        options += ["--protocol", "tls"]
        options += [part for o, name in names.items() for part in (o, str(folder / name))]
    process = subprocess.Popen(
        [sys.executable, "-c", _START, *options], stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield address
    finally:
        process.kill()
        process.wait()
