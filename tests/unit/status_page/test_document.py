"""The document says what is known, and does not change while nothing happens."""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from holdfast.configuration_record import Configuration
from holdfast.engine.requests.request_progress import RequestRow
from holdfast.lifecycle.states import State
from holdfast.records import (
    BaselineComparison,
    Death,
    EngineReport,
    HostMemory,
    NodeStatus,
    Status,
)
from holdfast.status_page.activity import WatchedProgress
from holdfast.status_page.document import MAX_ROWS, DocumentBuilder
from holdfast.status_page.history import History, Sample
from holdfast.status_page.patch import StatusDocument, difference
from holdfast.status_page.sources import Sources
from holdfast.telemetry.collector import RequestCounts
from holdfast.telemetry.progress import LogProgress
from holdfast.verify.records import VerifyRun
from sample_status import MIB, REJECTION, a_fresh_status, a_probe, a_rank, a_status
from scripted_page import a_document, a_start
from stub_engine import FACTS

ALWAYS = {
    *("server", "state", "reason", "since", "engine", "start", "progress", "proof"),
    *("ranks", "requests", "timeline", "history"),
}


def a_builder(status: Status | None = None, **sources: Any) -> DocumentBuilder:
    """A server in this status."""
    history = History(lambda: 1)
    given = Sources(
        status=lambda: status or a_status(),
        generation=lambda: 1,
        restarts_left=lambda: 3,
        **sources,
    )
    progress = WatchedProgress(LogProgress(logging.getLogger("test")), history.state_changed)
    return DocumentBuilder(given, history, progress)


def built(status: Status | None = None, **sources: Any) -> StatusDocument:
    """The document of a server in this status."""
    return a_builder(status, **sources).build()


def values(document: object) -> Iterator[object]:
    """Every value in a document."""
    if isinstance(document, dict):
        for member in document.values():
            yield from values(member)
    elif isinstance(document, list):
        for member in document:
            yield from values(member)
    else:
        yield document


def test_the_first_second_has_only_what_is_known() -> None:
    """No null stands for what is not."""
    document = built(a_fresh_status())
    assert set(document) == ALWAYS
    assert None not in values(json.loads(json.dumps(document)))


def test_a_document_in_which_nothing_happens_does_not_change() -> None:
    """A viewer of an idle server gets nothing."""
    builder = a_builder(
        a_status(ready_in_seconds=None),
        facts=lambda: FACTS,
        host_memory=lambda: HostMemory(100 * MIB, 200 * MIB, None),
    )
    assert difference(builder.build(), builder.build()) == {}


def test_the_reason_is_that_of_operators() -> None:
    """The stream needs the key, as `/statusz` does."""
    assert built(a_status(reason="died", detail="pid 7"))["reason"] == "died: pid 7"


def test_the_time_of_ready_is_expected_until_it_has_come() -> None:
    """As a moment, which does not change while it comes nearer, and is past once it is overdue."""
    for state in ("STARTING", "PROBING", "RECOVERING"):
        status = a_fresh_status(state=state, ready_in_seconds=-20.0)
        expected = datetime.fromisoformat(built(status)["ready_expected"]).timestamp()
        assert time.time() - 25 < expected < time.time() - 15
    assert "ready_expected" not in built(a_fresh_status(ready_in_seconds=None))


@pytest.mark.parametrize("state", ["READY", "DRAINING", "SLEEPING", "FAILED", "STOPPED"])
def test_a_state_that_does_not_lead_to_ready_expects_nothing(state: str) -> None:
    """Though the way to READY that it left had an end."""
    assert "ready_expected" not in built(a_fresh_status(state=state, ready_in_seconds=20.0))


def test_the_engine_has_its_life() -> None:
    """With what the budget still allows."""
    report = EngineReport(generation=2, restarts=1, starts=2, last_exit="stall: no step")
    assert built(a_status(engine=report), facts=lambda: FACTS)["engine"] == {
        "generation": 2,
        "restarts": 1,
        "restarts_left": 3,
        "starts": 2,
        "last_exit": "stall: no step",
    }


def test_a_rank_has_its_memory_and_its_slots() -> None:
    """Under the names of `/statusz`; a follower's rank names its node."""
    status = a_status(
        ranks=(a_rank(growth_limit_bytes=7 * MIB, last_rejection=REJECTION), a_rank(rank=1)),
        nodes=(NodeStatus("a", True, ((0, 0),)), NodeStatus("b", False, problem="away")),
    )
    document = built(status, kv_used=lambda: {0: 0.123456})
    ranks = document["ranks"]
    assert list(ranks) == ["0/0", "0/1"]
    assert ranks["0/0"]["slots"]["1/0"]["size_bytes"] == 8 * MIB
    assert ranks["0/0"]["memory"] == {"weights_bytes": 100 * MIB, "kv_cache_bytes": 64 * MIB}
    assert ranks["0/0"]["kv_used_ratio"] == 0.123
    assert ranks["0/0"]["growth_limit_bytes"] == 7 * MIB
    assert ranks["0/0"]["last_rejection"]["needed_bytes"] == REJECTION.needed_bytes
    assert (ranks["0/0"]["node"], "node" in ranks["0/1"]) == ("a", False)
    assert "growth_limit_bytes" not in ranks["0/1"]
    assert document["nodes"] == {
        "a": {"is_joined": True},
        "b": {"is_joined": False, "problem": "away"},
    }


@pytest.mark.parametrize(
    "status", [a_status(has_engine=False), a_status(State.SLEEPING)], ids=["dead", "asleep"]
)
def test_memory_that_was_given_back_is_not_shown(status: Status) -> None:
    """What the ranks counted is."""
    rank = built(status, kv_used=lambda: {0: 0.5})["ranks"]["0/0"]
    assert set(rank).isdisjoint({"memory", "slots", "kv_used_ratio", "retired_bytes"})
    assert (rank["steps"], rank["generation"]) == (3, 1)


def test_rows_with_a_nan_are_those_of_all_generations() -> None:
    """Unknown before the first rank, and not forgotten with an engine."""
    status = a_fresh_status()
    builder = a_builder()
    builder._sources = replace(builder._sources, status=lambda: status)
    assert "nan_rows" not in builder.build()["proof"]
    found = []
    for ranks in ((a_rank(nan_rows=2),), (), (a_rank(generation=2, nan_rows=1),)):
        status = a_status(ranks=ranks)
        found.append(builder.build()["proof"]["nan_rows"])
    assert found == [2, 2, 3]


def test_the_probe_says_when_it_ended() -> None:
    """The last run of its suite, once it is known."""
    builder = a_builder()
    assert "finished" not in builder.build()["probe"]
    builder._history.probe_ran(a_probe())
    assert builder.build()["probe"]["finished"].endswith("+00:00")


class Watch:
    """The last comparisons with a baseline."""

    def last(self) -> dict[str, BaselineComparison]:
        return {
            "probe": BaselineComparison(True, 0.5, 1.0),
            "canary": BaselineComparison(False, math.inf, 2.0),
        }


def test_a_difference_without_end_is_no_number() -> None:
    """JSON has none for it; that it does not agree is said."""
    baseline = built(baseline=Watch())["proof"]["baseline"]
    assert (baseline["probe"]["worst_nats"], baseline["probe"]["agrees"]) == (0.5, True)
    assert ("worst_nats" in baseline["canary"], baseline["canary"]["agrees"]) == (False, False)


def test_a_run_of_verify_is_a_proof() -> None:
    """Of what the operator told the server."""
    builder = a_builder()
    assert "verify" not in builder.build()["proof"]
    builder._history.verified(VerifyRun("passed", "full", 40, 0, 1))
    verify = builder.build()["proof"]["verify"]
    assert verify.pop("finished").endswith("+00:00")
    assert verify == {
        "verdict": "passed",
        "profile": "full",
        "passed": 40,
        "failed": 0,
        "inconclusive": 1,
    }


def test_requests_are_counted_and_some_are_shown() -> None:
    """Reasons that never occurred are left out."""
    asked: list[int] = []

    def rows(limit: int) -> tuple[list[RequestRow], int]:
        asked.append(limit)
        return [RequestRow(1, "held", None, "", 0, 0, None, None, 0)], 9

    requests = built(
        queue=lambda: (3, 4),
        requests=lambda: RequestCounts(5, 2, waiting=6, lost={"drained": 0, "suspected": 1}),
        refused=lambda: {"overloaded": 7},
        rows=rows,
    )["requests"]
    assert asked == [MAX_ROWS]
    assert requests == {
        "in_flight": 5,
        "held": 2,
        "running": 3,
        "waiting": 6,
        "replayed": 0,
        "continued": 0,
        "refused": {"overloaded": 7},
        "lost": {"suspected": 1},
        "rows": {"1": {"stage": "held", "generation": 0, "replays": 0, "output_tokens": 0}},
        "rows_left_out": 9,
    }


@pytest.mark.parametrize(("available", "shown"), [(100 * MIB, 96 * MIB), (16 * MIB, 16 * MIB)])
def test_the_hosts_memory_is_rounded(available: int, shown: int) -> None:
    """It changes by less at every look."""
    memory = built(host_memory=lambda: HostMemory(available, 200 * MIB, None))["host_memory"]
    assert memory == {
        "available_bytes": shown,
        "total_bytes": 200 * MIB,
        "is_unified": False,
    }


def test_a_growth_is_seen_at_the_next_look() -> None:
    """A viewer does not wait for the next point of the curves."""
    document = built(a_status(ranks=(a_rank(growths={"locked": 1}),)))
    assert [event["kind"] for event in document["timeline"].values()] == ["growth"]


def test_the_activity_of_a_start_is_shown() -> None:
    """With the step and its size."""
    builder = a_builder(a_fresh_status())
    builder._progress.step_started("full_context", "1 of 2", 512)
    activity = builder.build()["activity"]
    assert {name: activity[name] for name in ("phase", "step", "detail", "tokens")} == {
        "phase": "probe",
        "step": "full_context",
        "detail": "1 of 2",
        "tokens": 512,
    }


def paths(document: object, path: str = "") -> set[str]:
    """The members of a document, with * for names that are numbers and for names of things."""
    if not isinstance(document, Mapping):
        return {path}
    is_map = path in NAMED or any(re.fullmatch(r"[0-9/]+", name) for name in document)
    return {path}.union(
        *(paths(value, f"{path}.{'*' if is_map else name}") for name, value in document.items())
    )


NAMED = {
    ".nodes",
    ".server.versions",
    ".start.phases_s",
    ".proof.baseline",
    ".requests.refused",
    ".requests.lost",
    ".ranks.*.memory",
}


def test_the_script_says_nothing_that_no_server_says() -> None:
    """The tests of the page in a browser are about this document."""
    status = a_status(
        engine=EngineReport(restarts=1, starts=2, last_start_seconds=1.0, last_exit="stall"),
        ranks=(a_rank(growth_limit_bytes=7 * MIB, last_rejection=REJECTION),),
        nodes=(NodeStatus("a", True, ((0, 0),)), NodeStatus("b", False, problem="away")),
        start_phases={"load": 1.0},
    )
    row = RequestRow(1, "decode", 1.0, "key", 1, 0, 10, 10, 5)
    builder = a_builder(
        status,
        facts=lambda: FACTS,
        configuration=lambda: Configuration(
            versions={"vllm": "0"}, devices=("a",), driver="1", model="m"
        ),
        host_memory=lambda: HostMemory(MIB, 2 * MIB, None),
        kv_used=lambda: {0: 0.5},
        baseline=Watch(),
        requests=lambda: RequestCounts(lost={"suspected": 1}),
        refused=lambda: {"overloaded": 7},
        rows=lambda _: ([row], 0),
    )
    history = builder._history
    history.state_changed("READY", "")
    history.engine_died(Death("stall", ""))
    history.probe_ran(a_probe())
    history.verified(VerifyRun("passed", "full", 40, 0, 1))
    history.saw_ranks([a_rank(growths={"locked": 1})])
    canary = BaselineComparison(True, 0.5, 1.0)
    history.take(Sample(first_token_seconds=(1.0,), kv_used_ratio=0.5, canary=canary), 1, 15.0)
    starting = a_builder(a_fresh_status(ready_in_seconds=20.0))
    starting._progress.step_started("full_context", "1 of 2", 512)
    said = paths(builder.build()) | paths(starting.build())
    said.add(".requests.rows.*.output_tokens_per_second")
    assert (paths(a_document()) | paths(a_start())) - said == set()
