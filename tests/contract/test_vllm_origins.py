"""Which web pages may use a server? Those of the origins that are named, and by default none."""

from __future__ import annotations

import pytest

from holdfast.cli import parse_serve
from holdfast.engine.launch.arguments import parse


def test_no_page_of_another_origin_is_let_in_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else any page that a browser shows could use a server without keys on the same machine."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD")  # else forks are ruled out, for good
    assert parse(parse_serve(["model"], {})).allowed_origins == []
