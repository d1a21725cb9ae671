"""Which address and which interface of this machine lead to the other nodes?

vLLM takes the address of the default route, gloo the one that the host's name resolves to, and NCCL
the first interface that is up (vLLM 0.32 `get_ip`, torch 2.13 `ProcessGroupGloo.cpp`, NCCL's
`NCCL_SOCKET_IFNAME`). Between two machines with a cable of their own, all three are wrong.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import psutil

from holdfast.errors import UsageError, reason_of
from holdfast.loopback import is_loopback

logger = logging.getLogger(__name__)

ANY_PORT = 9
"""Of a socket that sends nothing."""
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


@dataclass(frozen=True, slots=True)
class HeadAddress:
    """Where the head listens for followers."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def addresses_by_interface() -> dict[str, tuple[str, ...]]:
    """Return the IP addresses of each interface of this machine, without their scope."""
    return {
        name: tuple(one.address.partition("%")[0] for one in addresses if one.family in _FAMILIES)
        for name, addresses in psutil.net_if_addrs().items()
    }


def family_of(address: str) -> socket.AddressFamily:
    """Return the family of an IP address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def own_address(name: str) -> str:
    """Return the address of this machine that `name`, given as --master-addr, stands for.

    It warns of a name that stands for the loopback, as that of the host does on Debian.

    Raises:
        UsageError: it does not resolve, or is an address of another machine.
    """
    try:
        family, *_, address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.bind(address)
    except (OSError, ValueError) as error:  # ValueError: a name that cannot be encoded
        raise UsageError(
            f"--master-addr {name}: {reason_of(error)}.",
            remedy="give the address of this machine at which the other nodes reach it.",
        ) from None
    own = str(address[0])
    if is_loopback(own) and not is_loopback(name):
        logger.warning(
            "--master-addr: %s is %s, which other machines cannot reach; give the address of this "
            "machine on the cable",
            name,
            own,
        )
    return own


def address_towards(name: str) -> str:
    """Return the address from which this machine sends to `name`; nothing is sent.

    Raises:
        UsageError: the name does not resolve, or there is no route.
    """
    try:
        family, *_, address = socket.getaddrinfo(name, ANY_PORT, type=socket.SOCK_DGRAM)[0]
        return sending_address(family, address)
    except OSError as error:
        raise UsageError(
            f"{name} cannot be reached from this node: {error.strerror or error}.",
            remedy="check the cable and the routes.",
        ) from None


def sending_address(family: int, peer: tuple[Any, ...]) -> str:
    """Return the address from which this machine sends to a socket's address; nothing is sent.

    Raises:
        OSError: there is no route.
    """
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(peer)
        return str(sock.getsockname()[0])


def free_port(address: str) -> int:
    """Return a port that nobody listens on at this address of this machine now."""
    with socket.socket(family_of(address), socket.SOCK_STREAM) as sock:
        sock.bind((address, 0))
        return int(sock.getsockname()[1])


def prefer(address: str, environment: MutableMapping[str, str]) -> None:
    """Have vLLM, gloo and NCCL use this address and its interface, where nothing else is set."""
    environment.setdefault("VLLM_HOST_IP", address)
    of_interfaces = addresses_by_interface().items()
    if interface := next((name for name, its in of_interfaces if address in its), ""):
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
        # Without `=`, NCCL takes the beginning of a name, and eth1 would also be eth10; see
        # https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html.
        environment.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
