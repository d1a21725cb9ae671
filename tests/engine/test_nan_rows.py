"""A NaN in one row is counted; an engine with no sound row is replaced, and answers then."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from faults import FaultyServer
from holdfast.worker.nan_rows import LOST_ROWS
from servers import Server

pytestmark = [
    pytest.mark.engine,
    pytest.mark.shares_engine("compared"),
    pytest.mark.timeout(600),
]


def texts(server: Server, prompts: int) -> list[str]:
    """The answers to prompts that decode together."""
    asked = [f"Question {number}: " for number in range(prompts)]
    body = {"prompt": asked, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    request = {"model": server.model, **body}
    core = FaultyServer(server, Path()).process("EngineCore")
    with ThreadPoolExecutor(1) as client:
        core.suspend()  # so that it has all of them when it begins with the first
        try:
            asking = client.submit(server.post, "/v1/completions", request, timeout=240)
            server.until(lambda: server.sent == prompts, "all prompts")
        finally:
            core.resume()
        answer = asking.result()
    assert answer.status_code == 200, answer.text
    return [str(choice["text"]) for choice in answer.json()["choices"]]


def test_one_bad_row_is_counted_and_the_engine_goes_on(
    compared: Server, nan_triggers: Path
) -> None:
    """Nothing else tells that a token of this answer is arbitrary."""
    texts(compared, 4)
    generation = compared.metric("engine_generation")
    assert compared.metric("engine_nan_rows_total") == 0
    (nan_triggers / "row").touch()
    texts(compared, 4)
    assert not (nan_triggers / "row").exists()
    assert compared.metric("engine_nan_rows_total") == 1
    assert compared.metric("engine_generation") == generation


def test_an_engine_without_a_sound_row_is_replaced(compared: Server, nan_triggers: Path) -> None:
    """The death has a cause of its own, its rows stay counted, and the answers are sound."""
    sound = texts(compared, LOST_ROWS)
    generation = compared.metric("engine_generation")
    (nan_triggers / "step").touch()
    assert texts(compared, LOST_ROWS) == sound
    assert compared.metric("engine_deaths_total", cause="nan_logits") == 1
    assert compared.metric("engine_generation") == generation + 1
    assert compared.metric("engine_nan_rows_total") >= LOST_ROWS
    assert "none of the last" in compared.status["engine"]["last_exit"]
