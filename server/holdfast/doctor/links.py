"""Which network interfaces does this machine have, and which one leads to a peer?"""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.doctor.reach import Address
from holdfast.nodes.addresses import ANY_PORT, addresses_by_interface, sending_address

_INTERFACES = "sys/class/net"
_VERBS = "dev/infiniband"


@dataclass(frozen=True, slots=True)
class Interface:
    """One network interface."""

    name: str
    addresses: tuple[str, ...] = ()
    """Without the scope of those that are link-local."""
    mtu_bytes: int | None = None
    """None if it is not known, as for the speed."""
    speed_megabits: int | None = None
    """Per second; virtual and wireless interfaces report none."""
    is_up: bool = True
    is_physical: bool = False
    is_wireless: bool = False
    rdma_devices: tuple[str, ...] = ()
    """The devices for NCCL's `NCCL_IB_HCA` that send through this interface."""


@dataclass(frozen=True, slots=True)
class Network:
    """What the checks need to know about the network of this machine."""

    interfaces: tuple[Interface, ...]
    """In the kernel's order."""
    has_verbs: bool = False
    """Whether the devices that NCCL opens for RDMA are in this container."""
    has_memory_lock_limit: bool = False
    """Whether this process may lock only some memory; RDMA locks what it sends."""

    def has_address(self, address: str) -> bool:
        """Return whether it is an address of this machine."""
        return any(address in one.addresses for one in self.interfaces)


@dataclass(frozen=True, slots=True)
class Route:
    """How packets for a peer leave this machine."""

    local_address: str
    interface: Interface | None
    """None if no interface has that address."""


def read_network(root: Path = Path("/")) -> Network:
    """Read the network of this machine; `root` has its `sys` and `dev`."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Network(
        interfaces=tuple(read_interfaces(addresses_by_interface(), root)),
        has_verbs=any((root / _VERBS).glob("uverbs*")),
        has_memory_lock_limit=limit != resource.RLIM_INFINITY,
    )


def read_interfaces(addresses: Mapping[str, tuple[str, ...]], root: Path) -> Iterator[Interface]:
    """Yield every interface, in the kernel's order.

    One that has an address but is not below `sys`, as in a network namespace of another mount, is
    last, and nothing else is known about it.
    """
    try:
        directories = [path for path in (root / _INTERFACES).iterdir() if path.is_dir()]
    except OSError:
        directories = []
    for path in sorted(directories, key=lambda path: (_number(path / "ifindex") or 0, path.name)):
        yield _interface(path, addresses.get(path.name, ()))
    known = {path.name for path in directories}
    for name in addresses:
        if name not in known:
            yield Interface(name, addresses[name])


def route_to(peer: Address, network: Network) -> Route | None:
    """Return how packets for the peer leave; None if there is no route. Nothing is sent."""
    try:
        local, _, _ = sending_address(peer.family, peer.at(ANY_PORT)).partition("%")
    except OSError:
        return None
    found = (one for one in network.interfaces if local in one.addresses)
    return Route(local, next(found, None))


def _interface(path: Path, addresses: tuple[str, ...]) -> Interface:
    speed = _number(path / "speed")
    return Interface(
        name=path.name,
        addresses=addresses,
        mtu_bytes=_number(path / "mtu"),
        speed_megabits=speed if speed is not None and speed > 0 else None,
        # Loopback and tunnels do not know whether they are.
        is_up=_text(path / "operstate") in {"up", "unknown"},
        is_physical=(path / "device").exists(),
        is_wireless=(path / "wireless").exists() or (path / "phy80211").exists(),
        rdma_devices=tuple(sorted(one.name for one in (path / "device/infiniband").glob("*"))),
    )


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.removeprefix("-").isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:  # an interface that is down refuses to tell its speed
        return ""
