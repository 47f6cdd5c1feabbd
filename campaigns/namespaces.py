"""Machines of a small network, each a network namespace of Linux; making them takes root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def can_be_made() -> bool:
    """Whether this process may make namespaces."""
    return shutil.which("ip") is not None and os.geteuid() == 0


class Network:
    """Machines that are joined by one switch, a namespace of its own.

    Attributes:
        addresses: By a machine's name.
    """

    def __init__(self, machines: Sequence[str]) -> None:
        self._prefix = f"qlora{os.getpid()}"
        self._switch = f"{self._prefix}-switch"
        self._machines = list(machines)
        self.addresses = {name: f"10.99.0.{n + 1}" for n, name in enumerate(machines)}

    def make(self) -> None:
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        ip("-n", self._switch, "link", "set", "switch", "up")
        for name in self._machines:
            space = self.namespace(name)
            ip("netns", "add", space)
            ip("-n", self._switch, "link", "add", name, "type", "veth",
               "peer", "name", "eth0", "netns", space)  # fmt: skip
            ip("-n", self._switch, "link", "set", name, "master", "switch", "up")
            ip("-n", space, "address", "add", f"{self.addresses[name]}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", "eth0", "up")

    def remove(self) -> None:
        for space in (*map(self.namespace, self._machines), self._switch):
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)

    def namespace(self, machine: str) -> str:
        return f"{self._prefix}-{machine}"

    def cable(self, machine: str, *, plugged: bool) -> None:
        """Pulls a machine's cable, or plugs it in again."""
        ip("-n", self._switch, "link", "set", machine, "up" if plugged else "down")

    def isolate(self, machine: str, *, isolated: bool) -> None:
        """Puts a machine behind a wall, or takes it away: walled ones do not see each other."""
        state = "on" if isolated else "off"
        ip("-n", self._switch, "link", "set", machine, "type", "bridge_slave", "isolated", state)

    def shape(self, machine: str, gigabits: float) -> None:
        """Limits what a machine sends and gets."""
        queue = ["root", "tbf", "rate", f"{gigabits}gbit", "burst", "512kb", "latency", "100ms"]
        for space, device in ((self.namespace(machine), "eth0"), (self._switch, machine)):
            subprocess.run(
                ["tc", "-n", space, "qdisc", "replace", "dev", device, *queue],
                check=True, capture_output=True,
            )  # fmt: skip

    def start(self, machine: str, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """A process on a machine; it is the process that ends with the returned one."""
        space = self.namespace(machine)
        return subprocess.Popen(["ip", "netns", "exec", space, *command], **options)


@contextmanager
def network(machines: Sequence[str]) -> Iterator[Network]:
    """Machines that are gone afterwards."""
    made = Network(machines)
    try:
        made.make()
        yield made
    finally:
        made.remove()
