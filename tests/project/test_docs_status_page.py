"""What the guide says of the stream is what the stream has."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

from holdfast.records import EngineReport, HostMemory, NodeStatus
from holdfast.status_page.activity import WatchedProgress
from holdfast.status_page.curves import INTERVAL_SECONDS as POINT_SECONDS
from holdfast.status_page.curves import MAX_POINTS
from holdfast.status_page.document import MAX_ROWS, DocumentBuilder
from holdfast.status_page.feed import (
    COMMENT_SECONDS,
    INTERVAL_SECONDS,
    MAX_EVENTS_PER_SECOND,
    MAX_STREAM_SECONDS,
    MAX_VIEWERS,
    MAX_VIEWERS_PER_KEY,
    Feed,
    interval_seconds,
)
from holdfast.status_page.history import History
from holdfast.status_page.sources import Sources
from holdfast.status_page.timeline import HORIZON_SECONDS, MAX_EVENTS, EventKind
from holdfast.telemetry.progress import LogProgress
from project.test_docs import INLINE, STATUS_PAGE, table
from sample_status import a_fresh_status
from stub_engine import FACTS


def a_whole_document() -> dict[str, Any]:
    """One in which everything is known."""
    status = a_fresh_status(
        ready_in_seconds=1.0,
        engine=EngineReport(last_exit="stall"),
        nodes=(NodeStatus("a", is_joined=True),),
    )
    baseline: Any = SimpleNamespace(last=dict)
    sources = Sources(
        status=lambda: status,
        generation=lambda: 1,
        restarts_left=lambda: 1,
        facts=lambda: FACTS,
        host_memory=lambda: HostMemory(1, 2, None),
        baseline=baseline,
    )
    history = History(lambda: 1)
    progress = WatchedProgress(LogProgress(logging.getLogger("test")), history.state_changed)
    progress.phase_started("load")
    return dict(Feed(DocumentBuilder(sources, history, progress).build).current())


def test_every_member_of_the_document_is_explained() -> None:
    """In the order in which the document has them, except the probe's, which is not there yet."""
    members = [row[0].strip("`") for row in _second_table()]
    assert [name for name in members if name != "probe"] == list(a_whole_document())


def _second_table() -> list[tuple[str, ...]]:
    text = STATUS_PAGE.read_text()
    return [
        tuple(cell.strip() for cell in line.split("|")[1:-1])
        for line in text[text.index("| member | content |") :].splitlines()
        if line.startswith("| `")
    ]


def test_every_kind_of_event_is_named() -> None:
    """The time line has no other."""
    row = next(row for row in _second_table() if row[0] == "`timeline`")
    assert tuple(INLINE.findall(row[1])) == get_args(EventKind)


def test_every_event_of_the_stream_is_named() -> None:
    """Those that a reader has to know."""
    source = Path(Feed.__init__.__code__.co_filename).read_text()
    names = [row[0].strip("`") for row in table(STATUS_PAGE, "## The stream")]
    assert names == ["snapshot", "change", "renew", "bye"]
    assert all(f"event: {name}" in source for name in names)


def test_the_bounds_are_those_of_the_code() -> None:
    """Time, number and size, as a reader may rely on them."""
    text = " ".join(STATUS_PAGE.read_text().split())
    assert INTERVAL_SECONDS == 0.5
    assert "at most twice a second" in text
    few = int(INTERVAL_SECONDS * MAX_EVENTS_PER_SECOND)
    assert f"More than {few} viewers get changes less often: " in text
    assert f"at most {MAX_EVENTS_PER_SECOND} a second are sent to all viewers together" in text
    assert interval_seconds(50) == 5
    assert "each of 50 gets one every five seconds" in text
    assert f"After {COMMENT_SECONDS:g} s without an event" in text
    assert f"At most {MAX_VIEWERS} viewers" in text
    assert f"at most {MAX_VIEWERS_PER_KEY} with one key" in text
    assert MAX_STREAM_SECONDS == 5 * 60
    assert "this stream ends after five minutes" in text
    assert f"at most {MAX_ROWS} requests" in text
    assert f"the events of {HORIZON_SECONDS / 3600:g} hours, at most {MAX_EVENTS}:" in text
    assert MAX_POINTS * POINT_SECONDS == 3600
    assert f"a point for each {POINT_SECONDS} s of the last hour" in text
