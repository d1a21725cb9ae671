"""What a request occupies while it is served."""

from __future__ import annotations

import pytest

from holdfast.api.router import work_of


@pytest.mark.parametrize(
    ("method", "path", "work"),
    [
        ("POST", "/v1/chat/completions", "engine"),
        ("POST", "/v1/responses", "engine"),
        ("POST", "/not/known/yet", "engine"),
        ("DELETE", "/v1/responses/1", "engine"),
        ("POST", "/tokenize/../v1/completions", "engine"),
        ("POST", "/resume/", "engine"),
        ("GET", "/v1/models", "none"),
        ("HEAD", "/v1/models", "none"),
        ("OPTIONS", "/v1/chat/completions", "none"),
        ("POST", "/tokenize", "rendering"),
        ("POST", "/base/detokenize", "rendering"),
        ("POST", "/resume", "none"),
        ("POST", "/v1/responses/resp_1/cancel", "none"),
        ("POST", "/v1/responses/a/b/cancel", "engine"),
    ],
)
def test_what_a_request_occupies(method: str, path: str, work: str) -> None:
    """The engine, if nothing else is known: what frees a full engine must never wait for it."""
    scope = {"type": "http", "method": method, "path": path}
    assert work_of(scope, "/base") == work
    assert work_of({"type": "websocket", "path": path}) == "session"
