"""The interfaces of a machine, and which one leads to a peer."""

from __future__ import annotations

import socket
from pathlib import Path

from holdfast.doctor.links import (
    Interface,
    read_interfaces,
    read_network,
    route_to,
)
from holdfast.doctor.reach import Address
from holdfast.nodes.addresses import addresses_by_interface


def add_interface(
    root: Path, name: str, files: dict[str, str], devices: tuple[str, ...] = ()
) -> None:
    """An interface as the kernel shows it below /sys."""
    directory = root / "sys/class/net" / name
    directory.mkdir(parents=True)
    for file, text in files.items():
        (directory / file).write_text(f"{text}\n")
    for device in devices:
        (directory / "device/infiniband" / device).mkdir(parents=True)


def test_what_the_kernel_shows_of_interfaces_is_read(tmp_path: Path) -> None:
    """In its order: a cable with RDMA, a wireless interface that tells no speed, and loopback."""
    add_interface(
        tmp_path,
        "enp1s0f1np1",
        {"ifindex": "4", "mtu": "9000", "speed": "200000", "operstate": "up"},
        devices=("rocep1s0f1",),
    )
    add_interface(
        tmp_path, "wlan0", {"ifindex": "3", "mtu": "1500", "speed": "-1", "operstate": "down"}
    )
    (tmp_path / "sys/class/net/wlan0/wireless").mkdir()
    add_interface(tmp_path, "lo", {"ifindex": "1", "mtu": "65536", "operstate": "unknown"})
    (tmp_path / "sys/class/net/bonding_masters").write_text("")
    addresses = {"enp1s0f1np1": ("10.0.0.1",), "lo": ("127.0.0.1",)}
    assert list(read_interfaces(addresses, tmp_path)) == [
        Interface("lo", ("127.0.0.1",), mtu_bytes=65536),
        Interface("wlan0", mtu_bytes=1500, is_up=False, is_wireless=True),
        Interface(
            "enp1s0f1np1",
            ("10.0.0.1",),
            mtu_bytes=9000,
            speed_megabits=200_000,
            is_physical=True,
            rdma_devices=("rocep1s0f1",),
        ),
    ]


def test_an_interface_that_is_not_below_sys_has_only_its_addresses(tmp_path: Path) -> None:
    """As where /sys is that of another network namespace, or is not there at all."""
    assert list(read_interfaces({"eth0": ("10.0.0.1",)}, tmp_path)) == [
        Interface("eth0", ("10.0.0.1",))
    ]


def test_the_network_of_this_machine_is_read(tmp_path: Path) -> None:
    """It has loopback, and RDMA where the container has the devices for it."""
    assert "127.0.0.1" in addresses_by_interface()["lo"]
    network = read_network(tmp_path)
    assert network.has_address("127.0.0.1")
    assert not network.has_verbs
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/infiniband/uverbs0").touch()
    assert read_network(tmp_path).has_verbs


def test_the_route_to_a_peer_is_the_kernels() -> None:
    """With the interface that has the address from which packets would be sent."""
    route = route_to(Address(socket.AF_INET, "127.0.0.9"), read_network())
    assert route is not None
    assert route.local_address == "127.0.0.1"
    assert route.interface is not None
    assert (route.interface.name, route.interface.mtu_bytes) == ("lo", 65536)


def test_a_peer_without_a_route_has_none() -> None:
    """The kernel refuses to send to every machine at once."""
    assert route_to(Address(socket.AF_INET, "255.255.255.255"), read_network()) is None
