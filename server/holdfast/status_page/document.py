"""Everything that the page shows, as one JSON document. docs/status-page.md has its members.

It has no null: an unknown value is absent. No value ages by itself, so a server on which nothing
happens has a document that does not change: times are absolute, and memory is rounded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from holdfast.configuration_record import Configuration
from holdfast.lifecycle.states import State
from holdfast.records import (
    EngineFacts,
    HostMemory,
    ProbeReport,
    RankStats,
    SlotStats,
    Status,
)
from holdfast.status_page.activity import Activity, WatchedProgress
from holdfast.status_page.curves import INTERVAL_SECONDS
from holdfast.status_page.history import History
from holdfast.status_page.patch import StatusDocument
from holdfast.status_page.request_table import RequestTable
from holdfast.status_page.sources import Sources
from holdfast.status_page.wall_clock import WallClock
from holdfast.telemetry.collector import holds_memory, last_step_seconds
from holdfast.telemetry.logs import iso_time
from holdfast.verify.records import VerifyRun

MAX_ROWS = 200
AVAILABLE_STEP_BYTES = 16 << 20
"""The available memory of a host changes all the time by less."""
_NAN_ROWS = "engine_nan_rows_total"
_ON_THE_WAY = frozenset({State.STARTING, State.PROBING, State.RECOVERING})
"""The states that lead to READY."""


class DocumentBuilder:
    """Builds the document from its sources. Belongs to one event loop."""

    def __init__(self, sources: Sources, history: History, progress: WatchedProgress) -> None:
        self._sources = sources
        self._history = history
        self._progress = progress
        self._started_unix_seconds = time.time()
        self._clock = WallClock()
        self._table = RequestTable(self._clock.written)

    def build(self) -> StatusDocument:
        """Return the document as of now."""
        sources = self._sources
        self._clock.was_set()
        status = sources.status()
        sources.totals.absorb(status.ranks)
        self._history.saw_ranks(status.ranks)
        return _known(
            server=_server(self._started_unix_seconds, sources.configuration(), sources.facts()),
            state=status.state,
            reason=f"{status.reason}: {status.detail}" if status.detail else status.reason,
            since=iso_time(status.since_unix_seconds),
            ready_expected=_ready_expected(status),
            engine=_engine(status, sources.restarts_left()),
            limits=_limits(sources.facts()),
            start={"phases_s": {name: round(s, 3) for name, s in status.start_phases.items()}},
            progress=self._steps(status),
            probe=_probe(status.probe, self._history.probed_unix_seconds),
            activity=_activity(self._progress.activity),
            proof=self._proof(),
            host_memory=_host_memory(sources.host_memory(), status.ranks),
            ranks=self._ranks(status),
            nodes=_nodes(status),
            requests=self._requests(),
            timeline=self._history.timeline.events(),
            history={"interval_seconds": INTERVAL_SECONDS, "points": self._history.curves.points()},
        )

    def _steps(self, status: Status) -> StatusDocument:
        running, waiting = self._sources.queue()
        last_seconds = last_step_seconds(status.ranks)
        last_step = None
        if last_seconds is not None:
            last_step = self._clock.written(math.floor(last_seconds))
        return _known(running=running, waiting=waiting, last_step=last_step)

    def _nan_rows(self) -> int | None:
        """Return how many all ranks of all generations had; None before the first rank."""
        counted = self._sources.totals.ranks().values()
        if not counted:
            return None
        return round(sum(sum(counts[_NAN_ROWS].values()) for counts in counted))

    def _proof(self) -> StatusDocument:
        watch = self._sources.baseline
        compared = watch.last() if watch is not None else {}
        return _known(
            nan_rows=self._nan_rows(),
            baseline={
                check: _known(
                    agrees=found.agrees,
                    worst_nats=found.worst_nats,
                    compared=self._clock.written(found.compared_seconds),
                )
                for check, found in compared.items()
            }
            or None,
            verify=_verified(self._history.last_verified),
        )

    def _ranks(self, status: Status) -> StatusDocument:
        node_of = {place: node.name for node in status.nodes for place in node.ranks}
        kv_used = self._sources.kv_used()
        are_held = holds_memory(status)
        return {
            f"{rank.engine}/{rank.rank}": {
                **_rank(rank, node_of.get((rank.engine, rank.rank))),
                **(_held(rank, kv_used.get(rank.engine)) if are_held else {}),
            }
            for rank in status.ranks
        }

    def _requests(self) -> StatusDocument:
        counts = self._sources.requests()
        running, _ = self._sources.queue()
        rows, left_out = self._sources.rows(MAX_ROWS)
        return {
            "in_flight": counts.in_flight,
            "held": counts.held,
            "running": running,
            "waiting": counts.waiting,
            "replayed": counts.replayed,
            "continued": counts.continued,
            "refused": dict(self._sources.refused()),
            "lost": {reason: count for reason, count in counts.lost.items() if count},
            "rows": self._table.rows(rows, time.monotonic()),
            "rows_left_out": left_out,
        }


def _server(
    started_unix_seconds: float, configuration: Configuration, facts: EngineFacts | None
) -> StatusDocument:
    return _known(
        started=iso_time(started_unix_seconds),
        model=(facts.model if facts else configuration.model) or None,
        versions=dict(configuration.versions),
        devices=list(configuration.devices) or None,
        driver=configuration.driver or None,
    )


def _ready_expected(status: Status) -> str | None:
    if status.ready_in_seconds is None or status.state not in _ON_THE_WAY:
        return None
    return iso_time(round(time.time() + status.ready_in_seconds))


def _engine(status: Status, restarts_left: int) -> StatusDocument:
    engine = status.engine
    return _known(
        generation=engine.generation,
        restarts=engine.restarts,
        restarts_left=restarts_left,
        starts=engine.starts,
        last_start_seconds=engine.last_start_seconds,
        last_exit=engine.last_exit or None,
    )


def _limits(facts: EngineFacts | None) -> StatusDocument | None:
    if facts is None:
        return None
    return {
        "max_model_len": facts.max_model_len,
        "max_num_seqs": facts.max_num_seqs,
        "max_num_batched_tokens": facts.max_num_batched_tokens,
        "kv_capacity_tokens": facts.kv_capacity_tokens,
    }


def _probe(
    probe: ProbeReport | None, finished_unix_seconds: Mapping[str, float]
) -> StatusDocument | None:
    if probe is None or probe.suite == "off":
        return None
    finished = finished_unix_seconds.get(probe.suite)
    return {
        **_known(finished=None if finished is None else iso_time(finished)),
        "suite": probe.suite,
        "passed": probe.passed,
        "limited": probe.limited,
        "proven_tokens": probe.proven_tokens,
        "duration_seconds": round(probe.duration_seconds, 3),
        "steps": [asdict(step) for step in probe.steps],
    }


def _verified(last: tuple[VerifyRun, float] | None) -> StatusDocument | None:
    if last is None:
        return None
    run, finished_unix_seconds = last
    return {"finished": iso_time(finished_unix_seconds), **asdict(run)}


def _activity(activity: Activity | None) -> StatusDocument | None:
    if activity is None:
        return None
    return _known(
        phase=activity.phase,
        since=iso_time(activity.since_unix_seconds),
        step=activity.step or None,
        detail=activity.detail or None,
        tokens=activity.tokens or None,
    )


def _host_memory(memory: HostMemory | None, ranks: Iterable[RankStats]) -> StatusDocument | None:
    if memory is None:
        return None
    return {
        "available_bytes": memory.available_bytes // AVAILABLE_STEP_BYTES * AVAILABLE_STEP_BYTES,
        "total_bytes": memory.total_bytes,
        "is_unified": any(rank.is_unified_memory for rank in ranks),
    }


def _rank(rank: RankStats, node: str | None) -> StatusDocument:
    """Return what a rank has counted, which is known after its end, too."""
    return _known(
        engine=rank.engine,
        rank=rank.rank,
        generation=rank.generation,
        node=node,
        is_locked=rank.is_locked,
        is_sealed=rank.is_sealed,
        growths=dict(rank.growths),
        rejections=dict(rank.rejections),
        last_rejection=asdict(rank.last_rejection) if rank.last_rejection else None,
        nan_rows=rank.nan_rows,
        steps=rank.steps,
        scheduled_tokens=rank.scheduled_tokens,
        fatal_error=rank.fatal_error or None,
    )


def _held(rank: RankStats, kv_used_ratio: float | None) -> StatusDocument:
    """Return where the memory is that a rank holds."""
    return _known(
        growth_limit_bytes=rank.growth_limit_bytes,
        retired_bytes=rank.retired_bytes,
        persistent_bytes=rank.persistent_bytes,
        lamport_bytes=rank.lamport_bytes,
        slots={f"{slot.ubatch}/{slot.lane}": _slot(slot) for slot in rank.slots},
        memory={f"{kind}_bytes": size for kind, size in rank.memory.items()},
        kv_used_ratio=None if kv_used_ratio is None else round(kv_used_ratio, 3),
    )


def _slot(slot: SlotStats) -> StatusDocument:
    return {
        "ubatch": slot.ubatch,
        "lane": slot.lane,
        "size_bytes": slot.size_bytes,
        "reserved_bytes": slot.reserved_bytes,
        "high_water_bytes": slot.high_water_bytes,
        "high_water_caller": slot.high_water_caller,
    }


def _nodes(status: Status) -> StatusDocument | None:
    nodes = {
        node.name: _known(is_joined=node.is_joined, problem=node.problem or None)
        for node in status.nodes
    }
    return nodes or None


def _known(**members: object) -> dict[str, Any]:
    """Return the members that are known; a number that JSON cannot write is not."""
    return {name: value for name, value in members.items() if _is_known(value)}


def _is_known(value: object) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))
