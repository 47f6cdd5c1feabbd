"""One end of benchmarks/cluster.py: an owner that times an exchange with a worker's actor.

usage: python benchmarks/cluster_peer.py SCHEDULER FOLDER|- REPEATS MEGABYTES...
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np
from distributed import Client, Security, wait


class Peer:
    """What a worker is to the owner, without its computing."""

    def __init__(self, number: int) -> None:
        self._gradient = np.random.default_rng(0).random(number, np.float32)

    def write(self, version: int, parameters: np.ndarray) -> None:
        """Takes parameters."""

    def gradient(self) -> np.ndarray:
        """Gives a gradient."""
        return self._gradient


def security(folder: str) -> Security | None:
    """As ``qlora_wgpu.cluster.security`` makes it; None for plain TCP."""
    from qlora_wgpu.cluster.security import connection_security

    if folder == "-":
        return None
    return connection_security("tls://any:1", folder, allow_plain_tcp=False)


def main(scheduler: str, folder: str, repeats: int, sizes: list[float]) -> None:
    """Prints a line of JSON for each size: seconds down and up, of each repeat."""
    with Client(scheduler, security=security(folder), direct_to_workers=True, timeout=60) as client:
        client.wait_for_workers(1, timeout=60)
        for megabytes in sizes:
            number = int(megabytes * 1e6 / 4)
            future = client.submit(Peer, number, actor=True, pure=False)
            wait(future, timeout=60)
            peer = future.result()
            parameters = np.random.default_rng(1).random(number, np.float32)
            down, up = [], []
            for version in range(repeats + 1):  # the first one connects
                began = time.perf_counter()
                peer.write(version, parameters).result()
                between = time.perf_counter()
                peer.gradient().result()
                down.append(between - began)
                up.append(time.perf_counter() - between)
            load = os.getloadavg()[0]
            row = {"megabytes": megabytes, "down": down[1:], "up": up[1:], "load": round(load, 1)}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), [float(size) for size in sys.argv[4:]])
