"""A cable with a speed and a length, between two network namespaces; takes root.

usage: python benchmarks/delay_line.py FROM TO GIGABITS MILLISECONDS

Kernels without netem cannot delay packets. This reads them from a tun device in each namespace
(10.98.0.1 and 10.98.0.2) and writes them to the other's when they would have arrived. Packets are
60 KB, so that Python keeps up with several Gbit/s. MILLISECONDS is there and back.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque

_MTU = 60_000
_TUNSETIFF, _TUN, _NO_INFO = 0x400454CA, 0x1, 0x1000


def _device(name: str, space: str, address: str) -> int:
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TUN | _NO_INFO))
    for command in (
        f"ip link set {name} netns {space}",
        f"ip -n {space} address add {address}/24 dev {name}",
        f"ip -n {space} link set {name} mtu {_MTU} txqueuelen 10000 up",
    ):
        subprocess.run(command.split(), check=True)
    return tun


def main(here: str, there: str, gigabits: float, milliseconds: float) -> None:
    """Carries packets until it is killed."""
    one = _device(f"qa{os.getpid()}", here, "10.98.0.1")
    two = _device(f"qb{os.getpid()}", there, "10.98.0.2")
    print("ready", flush=True)
    other = {one: two, two: one}
    waiting: dict[int, deque[tuple[float, bytes]]] = {one: deque(), two: deque()}
    free = {one: 0.0, two: 0.0}
    seconds_per_byte, delay = 8e-9 / gigabits, milliseconds / 2000
    while True:
        now = time.monotonic()
        due = min((q[0][0] for q in waiting.values() if q), default=now + 1.0)
        readable, _, _ = select.select([one, two], [], [], max(0.0, due - now))
        for tun in readable:
            packet = os.read(tun, _MTU + 100)
            free[tun] = max(time.monotonic(), free[tun]) + len(packet) * seconds_per_byte
            waiting[tun].append((free[tun] + delay, packet))
        now = time.monotonic()
        for tun, queue in waiting.items():
            while queue and queue[0][0] <= now:
                os.write(other[tun], queue.popleft()[1])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
