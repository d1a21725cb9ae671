"""What only this machine can connect to, and how it connects to a server that listens on all."""

from __future__ import annotations

import pytest

from holdfast.loopback import connectable, is_loopback


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("localhost", True),
        ("", False),
        ("0.0.0.0", False),  # noqa: S104 - not bound
        ("::", False),
        ("192.0.2.1", False),
        ("example.org", False),
    ],
)
def test_only_the_loopback_is_of_this_machine_alone(host: str, *, is_local: bool) -> None:
    """Every address of it, and its name; a server on all addresses is reached from elsewhere."""
    assert is_loopback(host) == is_local


@pytest.mark.parametrize(
    ("host", "reached"),
    [
        ("", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),  # noqa: S104 - not bound
        ("::", "::1"),
        ("192.0.2.1", "192.0.2.1"),
        ("localhost", "localhost"),
    ],
)
def test_a_server_on_all_addresses_is_reached_at_the_loopback(host: str, reached: str) -> None:
    """Of the same family; a server on one address is reached there."""
    assert connectable(host) == reached
