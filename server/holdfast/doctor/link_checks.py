"""Is the link to a peer fit for ranks that wait for each other? Pure functions of records."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.doctor.findings import Finding, HazardName, failure, ok, warning
from holdfast.doctor.links import Interface, Network, Route
from holdfast.doctor.machine import Machine
from holdfast.doctor.parallelism import Layout
from holdfast.doctor.peers import Peer

JUMBO_BYTES = 9000
ETHERNET_BYTES = 1500
FAST_MEGABITS = 100_000
"""From here on, the guides for two DGX Sparks ask for jumbo frames:
https://github.com/eugr/spark-vllm-docker/blob/main/docs/NETWORKING.md."""
SLOW_MEGABITS = 10_000
MOST_MEASURED_BYTES = 32_000
"""The first window of a connection, and not an MTU above this, limits its packets."""
_LOOPBACK = "lo"
_PAIR = 2


def check_link(peer: Peer, network: Network, machine: Machine, layout: Layout) -> Iterator[Finding]:
    """Yield every finding about the way from this machine to the peer."""
    if peer.route is None or peer.is_here:
        return
    interface = peer.route.interface
    if interface is not None and interface.name != _LOOPBACK:
        yield from _check_mtu(peer, interface)
        yield _check_speed(interface, network)
        yield from _check_rdma(interface, network, machine)
    yield from _check_choices(peer.route, network, machine, layout.master_address)


def _check_mtu(peer: Peer, interface: Interface) -> Iterator[Finding]:
    name: HazardName = "path-mtu"
    mtu_bytes = interface.mtu_bytes
    if mtu_bytes is None:
        return
    carried_bytes = peer.packet_bytes
    if carried_bytes is not None and carried_bytes < min(mtu_bytes, MOST_MEASURED_BYTES):
        yield warning(
            name,
            f"{interface.name} has an MTU of {mtu_bytes} bytes, and the peer takes packets of "
            f"{carried_bytes}.",
            f"give both nodes the same: `ip link set dev INTERFACE mtu {mtu_bytes}`.",
        )
    elif peer.packet_answer in {"lost", "too_long"}:
        yield warning(
            name,
            f"packets of {mtu_bytes} bytes, the MTU of {interface.name}, do not reach the peer, "
            "and shorter ones do: large transfers hang.",
            "raise the MTU of every switch and router in between, or lower that of both nodes.",
        )
    elif mtu_bytes <= ETHERNET_BYTES and (interface.speed_megabits or 0) >= FAST_MEGABITS:
        yield warning(
            name,
            f"{interface.name} has {_speed(interface)} and an MTU of {mtu_bytes} bytes, with which "
            "the CPU limits what NCCL sends over TCP.",
            f"`ip link set dev {interface.name} mtu {JUMBO_BYTES}` on both nodes, and as much on a "
            "switch in between.",
        )
    else:
        is_tried = peer.packet_answer == "answered"
        doubt = "" if is_tried else "; whether packets of this length arrive was not tried"
        yield ok(name, f"{mtu_bytes} bytes{doubt}")


def _check_speed(interface: Interface, network: Network) -> Finding:
    name: HazardName = "link"
    faster = [
        one
        for one in network.interfaces
        if one.is_physical and one.is_up and one.name != interface.name
        if (one.speed_megabits or 0) > (interface.speed_megabits or 0)
    ]
    best = max(faster, key=lambda one: one.speed_megabits or 0, default=None)
    if best is not None and (interface.is_wireless or interface.speed_megabits is not None):
        return warning(
            name,
            f"packets for the peer leave through {_described(interface)}, although "
            f"{_described(best)} is up.",
            f"give {best.name} an address on both nodes, and use that in --peer and --master-addr.",
        )
    if interface.is_wireless:
        return warning(
            name,
            f"packets for the peer leave through {_described(interface)}.",
            "connect the nodes with a cable, and use the addresses of its interfaces.",
        )
    if interface.speed_megabits is not None and interface.speed_megabits < SLOW_MEGABITS:
        return warning(
            name,
            f"{_described(interface)}: the ranks wait for each other in every layer.",
            "connect the nodes with a faster link, or use --pipeline-parallel-size instead of "
            "--tensor-parallel-size.",
        )
    return ok(name, _described(interface))


def _check_rdma(interface: Interface, network: Network, machine: Machine) -> Iterator[Finding]:
    """Yield what keeps NCCL from RDMA, which it uses where it can."""
    if machine.is_cpu_build or not interface.rdma_devices:
        return
    name: HazardName = "rdma"
    environment = machine.environment
    found = []
    if environment.get("NCCL_IB_DISABLE", "0") not in {"", "0"}:
        found.append(
            warning(name, "NCCL_IB_DISABLE: NCCL sends over TCP, which is slower.", "unset it.")
        )
    if index := environment.get("NCCL_IB_GID_INDEX", ""):
        found.append(
            warning(
                name,
                f"NCCL_IB_GID_INDEX={index}, as older guides say: NCCL has chosen it itself since "
                "2.21.",
                "unset it.",
            )
        )
    if not network.has_verbs:
        found.append(
            warning(
                name,
                "/dev/infiniband is missing here, so NCCL sends over TCP.",
                "start the container with --device /dev/infiniband.",
            )
        )
    if network.has_memory_lock_limit:
        found.append(
            warning(
                name,
                "this process may lock only some memory, and RDMA locks what it sends.",
                "start the container with --ulimit memlock=-1, or set LimitMEMLOCK=infinity.",
            )
        )
    found += _check_devices(interface, network, machine)
    yield from found or [ok(name, ", ".join(interface.rdma_devices))]


def _check_devices(interface: Interface, network: Network, machine: Machine) -> Iterator[Finding]:
    up = [device for one in network.interfaces if one.is_up for device in one.rdma_devices]
    given = machine.environment.get("NCCL_IB_HCA", "")
    is_spark = any(gpu.is_unified_memory for gpu in machine.gpu_facts.gpus)
    if given and not any(device in interface.rdma_devices for device in nccl_selected(given, up)):
        yield warning(
            "rdma",
            f"NCCL_IB_HCA={given} leaves out {', '.join(interface.rdma_devices)}, which leads to "
            "the peer.",
            f"NCCL_IB_HCA={','.join(up)}",
        )
    elif not given and is_spark and len(up) >= _PAIR:
        # One port is two devices, each with half of its bandwidth; see the guide above.
        yield warning(
            "rdma",
            f"NCCL_IB_HCA is not set, and {' and '.join(up)} are up.",
            f"NCCL_IB_HCA={','.join(up)} on both nodes, if they share the port of the cable.",
        )


def _check_choices(
    route: Route, network: Network, machine: Machine, master_address: str
) -> Iterator[Finding]:
    """Yield which of the given addresses and interfaces lead elsewhere than to the peer.

    What is not given, a start takes from the route.
    """
    environment = machine.environment
    found = [*_check_address(environment.get("VLLM_HOST_IP", ""), route, network)]
    # On a follower, it is an address of another machine.
    if network.has_address(master_address) and master_address != route.local_address:
        found.append(
            warning(
                "interfaces",
                f"--master-addr {master_address}, but {route.local_address} leads to the peer.",
                f"use --master-addr {route.local_address}.",
            )
        )
    if route.interface is not None:
        names = [one.name for one in network.interfaces if one.is_up and one.addresses]
        given = environment.get("GLOO_SOCKET_IFNAME", "")
        selected = [name for name in given.split(",") if name in names]
        found += _check_selection("GLOO_SOCKET_IFNAME", given, selected, route.interface)
        given = environment.get("NCCL_SOCKET_IFNAME", "")
        if not machine.is_cpu_build:
            selected = nccl_selected(given, names)
            found += _check_selection("NCCL_SOCKET_IFNAME", given, selected, route.interface)
    place = f" on {route.interface.name}" if route.interface is not None else ""
    yield from found or [ok("interfaces", f"{route.local_address}{place} leads to the peer")]


def _check_address(given: str, route: Route, network: Network) -> Iterator[Finding]:
    remedy = f"set it to {route.local_address}, or unset it."
    if given and not network.has_address(given):
        yield failure(
            "interfaces",
            f"VLLM_HOST_IP={given} is not an address of this machine, so vLLM cannot listen there.",
            remedy,
        )
    elif given and given != route.local_address:
        yield warning(
            "interfaces",
            f"VLLM_HOST_IP={given}, but {route.local_address} leads to the peer.",
            remedy,
        )


def _check_selection(
    variable: str, given: str, selected: list[str], interface: Interface
) -> Iterator[Finding]:
    remedy = f"{variable}={interface.name}, or unset it."
    if given and not selected:
        yield failure("interfaces", f"{variable}={given} names no interface that is up.", remedy)
    elif given and interface.name not in selected:
        yield warning(
            "interfaces", f"{variable}={given}, but {interface.name} leads to the peer.", remedy
        )


def nccl_selected(given: str, names: list[str]) -> list[str]:
    """Return the names that a list of NCCL's selects.

    It has beginnings of names, or with `=` whole names, perhaps each with a port; `^` selects all
    others. See https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html.
    """
    is_excluding = given.startswith("^")
    listed = given.removeprefix("^")
    is_exact = listed.startswith("=")
    wanted = [one.partition(":")[0] for one in listed.removeprefix("=").split(",") if one]
    return [
        name
        for name in names
        if any(name == one if is_exact else name.startswith(one) for one in wanted)
        is not is_excluding
    ]


def _described(interface: Interface) -> str:
    kind = "wireless" if interface.is_wireless else _speed(interface)
    return f"{interface.name} ({kind})"


def _speed(interface: Interface) -> str:
    if interface.speed_megabits is None:
        return "unknown speed"
    return f"{interface.speed_megabits / 1000:g} Gbit/s"
