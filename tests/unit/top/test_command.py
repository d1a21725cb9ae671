"""What a terminal shows of a server that is there, and of one that has gone."""

from __future__ import annotations

from holdfast.top.command import _Watch
from holdfast.top.reader import StatusEvent

SNAPSHOT = '{"time":"1970-01-01T00:02:00.000+00:00","state":"READY"}'


def test_nothing_gets_older_without_a_connection() -> None:
    """A server that died yesterday was not READY all night."""
    watch, now = _Watch("http://127.0.0.1:1", ""), [120.0]
    watch.mirror.clock = lambda: now[0]
    watch.mirror.take(StatusEvent("snapshot", SNAPSHOT, "a-1"))
    watch._tell("")
    now[0] = 130.0
    assert watch.now_unix_seconds == 130.0
    watch._tell("connection lost")
    now[0] = 5000.0
    watch._tell("connection refused")
    assert watch.now_unix_seconds == 130.0
    watch._tell("")
    assert watch.now_unix_seconds == 5000.0
