"""Which addresses reach this machine alone, and which one reaches a server that listens on all?"""

from __future__ import annotations

import ipaddress

WILDCARDS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - not bound
"""The hosts that stand for every address of this machine, and the loopback address of each."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to a server that listens on this host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, or every address
        return host == "localhost"


def connectable(host: str) -> str:
    """Return the host at which this machine connects to a server that listens on `host`."""
    return WILDCARDS.get(host, host)
