"""Which address and which interface of this machine lead to the other nodes?

vLLM takes the address of the default route, gloo the one that the host's name resolves to, and NCCL
the first interface that is up (vLLM 0.32 `get_ip`, torch 2.13 `ProcessGroupGloo.cpp`, NCCL's
`NCCL_SOCKET_IFNAME`). Between two machines with a cable of their own, all three are wrong.
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import psutil

from holdfast.errors import EngineStartError, UsageError, reason_of
from holdfast.loopback import is_loopback

logger = logging.getLogger(__name__)

ANY_PORT = 9
"""The port of a socket that sends nothing."""
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
ABSENCE_SECONDS = 3600.0
"""How long an address may be missing.

Starts that wait this long never reach the limit of systemd's unit, which counts within hours.
Docker counts over the life of a container.
"""
_POLL_SECONDS = 1.0
_NOT_YET = {errno.EADDRNOTAVAIL, socket.EAI_AGAIN}
"""No interface has the address, or no name server answers: time may change both."""
_CHECK = (
    "check that the other machine is on and the cable is in, and that `ip address` here shows the "
    "address; or give an address of this machine with --master-addr"
)


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


def wait_for_own_address(name: str, absence_seconds: float = ABSENCE_SECONDS) -> None:
    """Wait until an interface has the address, given as --master-addr.

    An interface gets none while the machine at the other end of its cable is off. What waiting
    cannot correct is left to `own_address`.

    Raises:
        EngineStartError: none has it in time.
    """
    deadline = time.monotonic() + absence_seconds
    is_told = False
    while reason := _absence(name):
        if time.monotonic() >= deadline:
            raise EngineStartError(
                f"--master-addr {name}: {reason}, for {absence_seconds:g} s.", remedy=f"{_CHECK}."
            )
        if not is_told:
            logger.warning("--master-addr %s: %s. Waiting for it; %s", name, reason, _CHECK)
            is_told = True
        time.sleep(_POLL_SECONDS)
    if is_told:
        logger.info("--master-addr: this machine has the address %s now", name)


def _absence(name: str) -> str:
    """Return why the name is not an address of this machine yet; empty if time cannot help."""
    try:
        _bind(name)
    except OSError as error:
        return reason_of(error) if error.errno in _NOT_YET else ""
    except ValueError:
        return ""
    return ""


def _bind(name: str) -> str:
    """Return the address that the name stands for, after this machine has bound it."""
    family, *_, address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.bind(address)
    return str(address[0])


def own_address(name: str) -> str:
    """Return the address of this machine that `name`, given as --master-addr, stands for.

    It warns of a name that stands for the loopback, as that of the host does on Debian.

    Raises:
        UsageError: it does not resolve, or is an address of another machine.
    """
    try:
        own = _bind(name)
    except (OSError, ValueError) as error:  # ValueError: a name that cannot be encoded
        raise UsageError(
            f"--master-addr {name}: {reason_of(error)}.",
            remedy="give the address of this machine at which the other nodes reach it.",
        ) from None
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
