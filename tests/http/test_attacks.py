"""The attacks of `soak/test_attacks.py`, each in small, one after the other on the same servers."""

from __future__ import annotations

from attacks import target, under_attack

SIZES = {
    "slow_headers": 50,
    "idle": 1000,
    "large_body": 96,
    "chunked_body": 96,
    "deep_json": 100_000,
    "closing_json": 31,
}
ASKED = 50
MAX_LARGER = 1.2


def peak_bytes(kind: str) -> int:
    """The memory that a server needs for all of them, while it answers `/livez` every time."""
    with target(kind) as server:
        for attack, size in SIZES.items():
            with under_attack(attack, server.port, size):
                server.livez_seconds(ASKED)
        return server.cost(1).peak_bytes


def test_attacks_cost_no_more_memory_than_a_bare_server() -> None:
    """Neither idle or slow connections, nor large bodies, nor deep JSON; and health is answered."""
    assert peak_bytes("front") <= MAX_LARGER * peak_bytes("bare")
