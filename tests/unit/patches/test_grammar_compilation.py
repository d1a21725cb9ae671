"""How long a grammar may compile, and how long it waits for a thread."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from holdfast.patches import grammar_compilation
from holdfast.patches.grammar_compilation import COMPILES_TOO_LONG, NOT_COMPILED, Compilation

AMPLE_SECONDS = 600.0


def compiling() -> Future[Any]:
    """A grammar whose turn in its thread has come."""
    future = Future[Any]()
    future.set_running_or_notify_cancel()
    return future


def test_a_grammar_that_waits_for_its_turn_has_all_its_time() -> None:
    """Even if none is left to one that compiles."""
    waiting = Future[Any]()
    compilation = Compilation(waiting, 0.0)
    assert not compilation.done()
    waiting.set_running_or_notify_cancel()
    assert compilation.done()
    assert compilation.result().stop_reason == COMPILES_TOO_LONG


def test_a_grammar_whose_turn_comes_late_has_all_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time in the queue is up, but it compiles."""
    monkeypatch.setattr(grammar_compilation, "MAX_QUEUE_SECONDS", 0.0)
    future = compiling()
    compilation = Compilation(future, AMPLE_SECONDS)
    assert not compilation.done()
    future.set_result("a grammar")
    assert compilation.done()
    assert compilation.result() == "a grammar"


def test_a_grammar_whose_turn_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles no more, and nothing is known against it."""
    monkeypatch.setattr(grammar_compilation, "MAX_QUEUE_SECONDS", 0.0)
    waiting = Future[Any]()
    compilation = Compilation(waiting, AMPLE_SECONDS)
    assert compilation.done()
    assert compilation.result().stop_reason == NOT_COMPILED
    assert waiting.cancelled()


def test_an_error_of_a_compilation_is_raised() -> None:
    """As vLLM expects it."""
    future = compiling()
    future.set_exception(ValueError("not a grammar"))
    compilation = Compilation(future, 0.0)
    assert compilation.done()
    with pytest.raises(ValueError, match="not a grammar"):
        compilation.result()


def test_a_grammar_that_was_given_up_ends_its_request() -> None:
    """With its first token, whatever that is."""
    given_up = Compilation(compiling(), 0.0)
    assert given_up.done()
    grammar = given_up.result()
    assert (grammar.filling([]), grammar.validate_tokens([1])) == (None, [])
    assert not grammar.accept_tokens("request", [1])
    assert grammar.is_terminated()
