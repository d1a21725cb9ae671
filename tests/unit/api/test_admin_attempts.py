"""The lines of admin calls without an admin key."""

from __future__ import annotations

import pytest

from holdfast.api.admin_attempts import MAX_LINES_PER_MINUTE, AdminAttempts


def test_many_attempts_are_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    """The first line of the next minute has the number of those that were left out."""
    now = [0.0]
    attempts = AdminAttempts(lambda: now[0])
    for _ in range(MAX_LINES_PER_MINUTE + 5):
        attempts.note("/admin/drain", "nobody", status=401, message="no.")
    attempts.note("/admin/drain", "alice", status=403, message="no.")
    now[0] = 60.0
    attempts.note("/admin/" + "x" * 10_000 + "\n", "nobody", status=401, message="no.")
    attempts.note("/admin/drain", "nobody", status=401, message="no.")
    one = "admin '/admin/drain' by nobody: refused with 401: no."
    assert caplog.messages[:MAX_LINES_PER_MINUTE] == [one] * MAX_LINES_PER_MINUTE
    alice, first, second = caplog.messages[MAX_LINES_PER_MINUTE:]
    assert alice == "admin '/admin/drain' by alice: refused with 403: no."
    assert first.endswith("x' by nobody: refused with 401: no. (and 5 calls before it)")
    assert len(first) < 300
    assert second == one
