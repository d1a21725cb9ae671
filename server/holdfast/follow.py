"""`holdfast follow`: the resources that the process holds while it runs ranks for a head.

It imports neither vLLM nor torch: each generation runs in processes of its own, see
`nodes.engine_processes`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

from prometheus_client import ProcessCollector
from starlette.applications import Starlette
from starlette.routing import Route

from holdfast import __version__, hide_keys
from holdfast.api.follower_health import follower_routes
from holdfast.api.metrics import metrics_route
from holdfast.errors import ExitCode
from holdfast.listener.server import bound_socket, listening
from holdfast.nodes import strict_json
from holdfast.nodes.addresses import HeadAddress
from holdfast.nodes.command_line import FollowSettings
from holdfast.nodes.credentials import Credentials, follower_credentials
from holdfast.nodes.dialer import Dialer
from holdfast.nodes.engine_processes import EngineProcesses
from holdfast.nodes.facts import node_facts
from holdfast.nodes.follower import Follower
from holdfast.nodes.memory import NodeMemory
from holdfast.nodes.messages import NONCE_BYTES, Start
from holdfast.processes import signals, tree
from holdfast.processes.environment import overridden
from holdfast.processes.runtime_directory import runtime_directory
from holdfast.records import Death, FollowerStatus, RankStats
from holdfast.settings import LimitSettings
from holdfast.telemetry.collector import FollowerCollector, OwnRegistry
from holdfast.telemetry.counters import Refusals, Totals
from holdfast.telemetry.logs import configure_logging
from holdfast.versions import vllm_version
from holdfast.worker.lifetime import PARENT_VARIABLE

logger = logging.getLogger(__name__)

RANKS_MODULE = "holdfast.engine.launch.node_ranks"
"""Runs the ranks of this node, in a process of its own; only its name is known here."""
_ORDER = "order.json"
_BASELINE = "device-memory.json"
"""What the devices of this node had in use before the first engine."""
ASKED_TO_END = "its process was asked to end"
LEAVE_SECONDS = 15.0
"""The time to end the ranks after SIGTERM. What follows takes `tree.KILL_DEADLINE_SECONDS` at most,
and systemd, Docker and the chart wait for 30 s or longer."""


def follow(settings: FollowSettings) -> ExitCode:
    """Run `holdfast follow` to its end.

    Raises:
        HoldfastError: the head refuses this node for good, or a flag, a file or an address is
            wrong; nothing is left behind.
    """
    configure_logging(
        settings.listen.log_level, style="json" if settings.log_format == "json" else "console"
    )
    if settings.has_ignored_flags:
        logger.info("the head hands out the model and its flags; those given here have no effect")
    credentials = follower_credentials(settings.key_file, settings.ca_certs)
    # Before any process is started, which would inherit the keys.
    hide_keys.hide_keys(settings.ignored_keys)
    with (
        signals.deferred() as has_come,
        bound_socket(settings.listen) as sock,
        runtime_directory() as directory,
        overridden({PARENT_VARIABLE: str(os.getpid())}),
        asyncio.Runner() as runner,
        tree.owned(directory, {}, has_fork_server=False),
    ):
        node = FollowingNode(settings, credentials, directory)
        runner.run(node.run(sock, has_come))
    return ExitCode.STOPPED


class FollowingNode:
    """All objects of one `holdfast follow`."""

    def __init__(self, settings: FollowSettings, credentials: Credentials, directory: Path) -> None:
        self._settings = settings
        self._directory = directory
        self._head = HeadAddress(settings.head_host, settings.head_port)
        self._follower = Follower(
            key=credentials.key,
            name=settings.node_name,
            instance=secrets.token_hex(NONCE_BYTES),
        )
        self._facts = asdict(node_facts(""))
        self._memory = NodeMemory(settings.memory)
        self._processes = EngineProcesses(directory, ranks_command, self._memory)
        self._ranks = LocalRanks(self._processes)
        self._dialer = Dialer(
            self._follower,
            self._head,
            self._ranks,
            find_facts=node_facts,
            has_memory=self._memory.is_ample,
            context=credentials.context,
        )
        self._processes.reports = self._ranks
        self._ranks.dialer = self._dialer

    async def run(self, sock: socket.socket, is_asked_to_stop: Callable[[], bool]) -> None:
        """Follow the head until a signal, or for as long as the head may take this node.

        Raises:
            UsageError: the head refuses this node for good.
        """
        with signals.draining(self._drain, self._end_now, has_come=is_asked_to_stop):
            async with (
                listening(
                    Starlette(routes=[*follower_routes(self._status), self._metrics()]),
                    sock,
                    self._settings.listen,
                    limits=LimitSettings(),
                    refusals=Refusals(),
                ),
                tree.resource_tracker_kept(),
            ):
                logger.info("node %s follows %s", self._settings.node_name, self._head)
                with self._memory.running():
                    try:
                        await self._dialer.run()
                    finally:
                        await self._processes.ended()

    def _drain(self) -> None:
        """Leave once the head has drained, which was asked to end at the same moment, or at once.

        The ranks are needed until then, and no other head may start an engine here.
        """
        seconds = self._settings.stop.head_drain_seconds
        if not seconds:
            self._leave()
            return
        logger.info(
            "leaving when the head has ended the engine, and in %g s at the latest", seconds
        )
        self._dialer.leave_after_engine(ASKED_TO_END)
        asyncio.get_running_loop().call_later(seconds, self._leave)

    def _leave(self) -> None:
        self._dialer.leave(ASKED_TO_END)
        asyncio.get_running_loop().call_later(LEAVE_SECONDS, self._give_up)

    def _give_up(self) -> NoReturn:
        logger.error("the ranks did not end within %g s, so they are abandoned", LEAVE_SECONDS)
        self._end_now(signal.SIGTERM, None)

    def _end_now(self, signal_number: int, frame: object) -> NoReturn:
        signals.end_now(self._directory, None, signal_number, frame)

    def _status(self) -> FollowerStatus:
        """Return what is known now. Any thread may ask."""
        order = self._follower.engine
        return FollowerStatus(
            node=self._settings.node_name,
            state=self._follower.state,
            head=str(self._head),
            is_connected=self._follower.is_connected,
            problem=self._follower.last_problem,
            generation=order.generation if order is not None else 0,
            ranks=self._ranks.newest,
            facts=self._facts,
        )

    def _metrics(self) -> Route:
        collector = FollowerCollector(
            self._status, self._ranks.totals, version=__version__, vllm_version=vllm_version()
        )
        registry = OwnRegistry(collector, ProcessCollector(registry=None))
        return metrics_route(lambda: (registry,))


class LocalRanks:
    """The engine of this node as the dialer sees it, which remembers what its ranks report."""

    def __init__(self, processes: EngineProcesses) -> None:
        self._processes = processes
        self._starts = 0
        self.totals = Totals()
        self.newest: tuple[RankStats, ...] = ()
        """The ranks of the generation that has processes here."""
        self.dialer: Dialer | None = None
        """Set before the first start."""

    def start(self, order: Start) -> None:
        """Start the processes of a generation."""
        self._starts += 1
        self._processes.start(order)

    def stop(self, generation: int, reason: str) -> None:
        """End every process of the generation, and report that."""
        self._processes.stop(generation, reason)

    def ranks_changed(
        self, generation: int, ranks: Sequence[RankStats], *, is_compiling: bool = False
    ) -> None:
        """Pass on the statistics of all ranks here, and count what they count."""
        self.newest = tuple(ranks)
        # A head that is replaced counts its generations from 1 again.
        self.totals.absorb(replace(rank, generation=self._starts) for rank in ranks)
        self._told().ranks_changed(generation, ranks, is_compiling=is_compiling)

    def engine_lost(self, generation: int, death: Death) -> None:
        """Pass on that the engine cannot go on."""
        logger.error("generation %d is lost: %s", generation, death)
        self._told().engine_lost(generation, death)

    def engine_refused(self, generation: int, line: str, *, is_final: bool) -> None:
        """Pass on that this node cannot run what it was handed out."""
        self._told().engine_refused(generation, line, is_final=is_final)

    def engine_ended(self, generation: int) -> None:
        """Pass on that no process of the engine is left."""
        self.newest = ()
        self._told().engine_ended(generation)

    def _told(self) -> Dialer:
        if self.dialer is None:
            raise RuntimeError("no receiver is set for reports of the ranks")
        return self.dialer


def ranks_command(order: Start, directory: Path) -> Sequence[str]:
    """Write the order into the directory, and return the command that runs its ranks.

    Raises:
        OSError: the file cannot be written.
    """
    path = directory / _ORDER
    path.write_bytes(strict_json.written(order))
    # -P: a directory of the user named `vllm` must not be taken for the package.
    files = (path, directory, directory.parent / _BASELINE)
    return [sys.executable, "-P", "-m", RANKS_MODULE, *map(str, files)]
