"""Short bursts of the same load to servers that are up side by side, in turns.

The machine treats two bursts in a row alike, so the ratio within a pair varies far less than that
of two runs that are minutes apart. The order of starts and the order of bursts alternate.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import pairs
from clients import Client, Result
from sides import Bench, Server

Pair = dict[str, dict[int, Result]]
"""By side, then by clients."""
LOOK_SECONDS = 0.2
MAX_LOOKS = 15
IDLE_SHARE = 0.2
"""Of one core, which servers that nobody asks for anything do not reach together."""


@dataclass(frozen=True, slots=True)
class Row:
    """The rows of the table for this number of clients."""

    label: str
    clients: int
    key: str
    """What `vllm bench serve` calls it, or a cost that is added here."""
    digits: int = 1
    goal: str = ""

    def measure(self, pairs_found: Sequence[Pair], asked: Sequence[str]) -> pairs.Measure:
        """The row of the table."""
        values = {
            side: [float(pair[side][self.clients][self.key]) for pair in pairs_found]
            for side in asked
        }
        return pairs.Measure(
            f"{self.label}, clients: {self.clients}", values, self.digits, self.goal
        )


def found(
    bench: Bench,
    client: Client,
    loads: Mapping[int, int],
    count: int,
    asked: Sequence[str],
) -> list[Pair]:
    """Measure this many pairs, half of them in each order of starts.

    `loads` are the requests of a burst by its clients.
    """
    orders = (asked, asked[::-1])
    parts = (range(count // 2), range(count // 2, count))
    return [
        pair
        for order, numbers in zip(orders, parts, strict=True)
        if numbers
        for pair in _in_order(bench, client, loads, numbers, order)
    ]


def burst(server: Server, client: Client, *, clients: int, requests: int, seed: int) -> Result:
    """Run the client once, and add what a token has cost the server in CPU time.

    A machine that others use too bends that far less than it bends rates and latencies.
    """
    front_end, everything = server.front_end_processor_seconds(), server.processor_seconds()
    result = client.run(server.url, clients=clients, requests=requests, seed=seed)
    spent = {
        "front_end_us_per_token": server.front_end_processor_seconds() - front_end,
        "server_us_per_token": server.processor_seconds() - everything,
    }
    tokens = result["total_output_tokens"]
    return {**result, **{name: seconds / tokens * 1e6 for name, seconds in spent.items()}}


def _in_order(
    bench: Bench,
    client: Client,
    loads: Mapping[int, int],
    numbers: range,
    order: Sequence[str],
) -> list[Pair]:
    with ExitStack() as stack:
        servers = {side: stack.enter_context(bench.ready(side)) for side in order}
        for server in servers.values():  # fills caches, and is not counted
            burst(server, client, clients=max(loads), requests=max(loads.values()), seed=0)
        return [_pair(servers, client, loads, number) for number in numbers]


def _pair(
    servers: Mapping[str, Server], client: Client, loads: Mapping[int, int], number: int
) -> Pair:
    results: Pair = {side: {} for side in servers}
    for clients, requests in loads.items():
        # No two bursts have the same prompts but those of a pair.
        seed = 1000 * (number + 1) + clients
        for side in pairs.ordered(number, tuple(servers)):
            settle(servers.values())
            results[side][clients] = burst(
                servers[side], client, clients=clients, requests=requests, seed=seed
            )
    return results


def settle(servers: Collection[Server]) -> None:
    """Wait until they are at rest: vLLM's processes spin for a second after their last request.

    The next burst would share its cores with that.
    """
    spent = _spent_seconds(servers)
    for _ in range(MAX_LOOKS):
        time.sleep(LOOK_SECONDS)
        before, spent = spent, _spent_seconds(servers)
        if spent - before < IDLE_SHARE * LOOK_SECONDS:
            return


def _spent_seconds(servers: Collection[Server]) -> float:
    return sum(server.processor_seconds() for server in servers)
