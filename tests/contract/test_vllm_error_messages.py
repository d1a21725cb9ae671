"""vLLM's error messages repeat what clients send, and take no longer for it."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from vllm.entrypoints.serve.exception_handling import utils
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.handlers.validation import (
    validation_exception_handler,
)
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from holdfast.api.errors import in_openai_form
from holdfast.patches.error_messages import MAX_CHARACTERS, bound_error_messages
from holdfast.patches.patch import original

MOST_SECONDS = 0.1
"""vLLM alone takes longer for the paths, and minutes for some of 32 KB; with the bound, 8 ms."""
HOSTILE = {
    "a path": "/a" * 2048,
    "a path of long names": ("/" + "a" * 15) * 512,
    "paths": ("/a" * 31 + ".") * 512,
    "spaces": " " * 32768 + 'File "a"',
    "addresses": " at 0x" * 4096,
    "files": 'File "' * 4096,
}
PLAIN = [
    "",
    "The model `m` does not exist.",
    "<Model at 0x7f00>",
    'Traceback:\n  File "/usr/lib/x.py", line 3, in run\n    go()\nValueError: no',
    "cannot open /srv/models/m or /app/server.py",
    "a" * (MAX_CHARACTERS - 1),
]


@pytest.fixture
def _bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "re", utils.re)
    bound_error_messages()
    bound_error_messages()


@pytest.mark.usefixtures("_bounded")
@pytest.mark.parametrize("case", HOSTILE)
def test_no_message_takes_long(case: str) -> None:
    """The event loop makes it, and everything waits meanwhile."""
    begun = time.process_time()
    create_error_response(f"The model `{HOSTILE[case]}` does not exist.")
    assert time.process_time() - begun < MOST_SECONDS


@pytest.mark.usefixtures("_bounded")
@pytest.mark.parametrize("message", PLAIN)
def test_an_ordinary_message_is_that_of_vllm(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same paths and addresses left out."""
    ours = create_error_response(message).error.message
    monkeypatch.setattr(utils, "re", original(utils, "re"))
    assert ours == create_error_response(message).error.message


@pytest.mark.usefixtures("_bounded")
def test_a_long_message_says_that_it_was_cut() -> None:
    """Its client knows what it sent."""
    message = create_error_response("word " * MAX_CHARACTERS).error.message
    assert len(message) == MAX_CHARACTERS
    assert message.endswith("(cut)")


@pytest.mark.usefixtures("_bounded")
def test_a_body_that_is_not_json_has_the_message_that_we_know_it_by() -> None:
    """It becomes a 415 by its words alone."""
    request: Any = SimpleNamespace(
        headers={"content-type": "text/plain"},
        app=SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(log_error_stack=False))),
    )

    async def answered() -> tuple[int, bytes]:
        with pytest.raises(RequestValidationError) as refused:
            await validate_json_request(request)
        answer = await validation_exception_handler(request, refused.value)
        return in_openai_form(answer.status_code, bytes(answer.body))

    status, _ = asyncio.run(answered())
    assert status == 415
