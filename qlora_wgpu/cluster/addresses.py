"""Addresses of schedulers, such as tls://gpu1:8786."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from qlora_wgpu.errors import ConfigError

_ADDRESS = re.compile(
    r"(?P<protocol>tls|tcp)://(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]@]+):(?P<port>[0-9]{1,5})/?"
)


@dataclass(frozen=True)
class Address:
    """Where a scheduler is.

    Attributes:
        protocol: ``"tls"`` or ``"tcp"``.
        host: A name or an IP address, an IPv6 one without brackets.
        port: From 1 to 65535.
    """

    protocol: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Reads an address.

        Raises:
            ConfigError: If it is none.
        """
        match = _ADDRESS.fullmatch(text)
        if match is None or not 1 <= int(match["port"]) <= 65535:
            raise ConfigError(
                f"a scheduler's address is tls://HOST:PORT, such as tls://gpu1:8786, got {text!r}"
            )
        return cls(match["protocol"], match["host"].strip("[]"), int(match["port"]))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.protocol}://{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can be meant."""
        if self.host.lower() == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # another name may mean any machine, whatever it means now
            return False
