"""A head or a follower as a process of its own: it prints what happens, one JSON object a line."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.nodes.actions import GenerationLost, HeadReport, NodeLeft, RanksChanged
from holdfast.nodes.addresses import HeadAddress
from holdfast.nodes.dialer import Dialer
from holdfast.nodes.engine_processes import EngineProcesses
from holdfast.nodes.follower import Follower
from holdfast.nodes.head import Head
from holdfast.nodes.listener import listening_for_nodes
from holdfast.nodes.memory import NodeMemory
from holdfast.nodes.messages import Start
from holdfast.processes import tree
from holdfast.settings import MemorySettings
from holdfast.worker import lifetime
from holdfast.workspace.stats import StatsWriter
from node_pairs import FACTS, KEY, SPEC


def say(**event: Any) -> None:
    """Print an event."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


async def be_head(host: str, port: int) -> None:
    """Start a generation whenever there can be one."""
    head = Head(key=KEY, name="head", model="m", facts=FACTS, nodes=2)

    def report(one: HeadReport) -> None:
        match one:
            case RanksChanged(generation, node, ranks) if ranks:
                say(what="ranks", generation=generation, node=node, pid=ranks[0].pid)
            case GenerationLost(generation, node, reason):
                say(what="lost", generation=generation, node=node, reason=reason)
            case NodeLeft(node, reason):
                say(what="left", node=node, reason=reason)

    generation = 0
    with socket.create_server((host, port)) as sock:
        say(what="listening", port=sock.getsockname()[1])
        async with listening_for_nodes(head, sock, on_report=report) as listener:
            while True:
                if head.is_complete:
                    generation += 1
                    listener.do(
                        head.start(
                            generation=generation,
                            master_address="127.0.0.1",
                            master_port=20000 + generation,
                            arguments=(),
                            fingerprint="f",
                            spec=SPEC,
                        )
                    )
                await asyncio.sleep(0.05)


async def follow(host: str, port: int, directory: Path) -> None:
    """Follow the head at that port, with an engine that has one rank."""

    def command(order: Start, place: Path) -> Sequence[str]:
        words = [__file__, "work", str(os.getpid()), str(place), str(order.generation)]
        return [sys.executable, *words]

    memory = NodeMemory(MemorySettings(guard="off"))
    engine = EngineProcesses(directory / "generations", command, memory)
    machine = Follower(key=KEY, name="b", instance=os.urandom(32).hex())
    address = HeadAddress(host, port)
    dialer = Dialer(machine, address, engine, find_facts=lambda _: FACTS)
    engine.reports = dialer
    (directory / "owned").mkdir(parents=True)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # no fork server, which imports vLLM
    with tree.owned(directory / "owned", {}):
        await dialer.run()


def work(parent: int, directory: Path, generation: int) -> None:
    """Be the only process of an engine, as long as its follower lives."""
    lifetime.die_with_parent(parent)
    with StatsWriter(directory, engine=0, rank=1, generation=generation):
        while True:
            time.sleep(60)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["head", host, port]:
            asyncio.run(be_head(host, int(port)))
        case ["follow", host, port, directory]:
            asyncio.run(follow(host, int(port), Path(directory)))
        case ["work", parent, directory, generation]:
            work(int(parent), Path(directory), int(generation))
