"""A NaN in one row is counted; an engine with no sound row is replaced, and answers then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.demo.files import ensure_demo_model
from holdfast.demo.switches import DemoFault, DemoSwitches
from holdfast.worker.nan_rows import LOST_ROWS
from servers import SMALL, Server, running

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

FLAGS = (*SMALL, "--dtype=float32", "--probe=quick", "--max-model-len=1024")


@pytest.fixture(scope="module")
def triggers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a file makes the next step of decodes fail."""
    return tmp_path_factory.mktemp("triggers")


@pytest.fixture(scope="module")
def server(
    models: Path, triggers: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A model that is sound until it is told not to be."""
    faults = (
        DemoFault("decodes", 2, "nan_row", armed_by=str(triggers / "row")),
        DemoFault("decodes", LOST_ROWS, "nan", armed_by=str(triggers / "step")),
    )
    model = ensure_demo_model(models, DemoSwitches(faults=faults))
    with running(tmp_path_factory.mktemp("nan"), str(model), *FLAGS) as one:
        one.until_ready()
        yield one


def texts(server: Server, prompts: int) -> list[str]:
    """The answers to prompts that decode together."""
    asked = [f"Question {number}: " for number in range(prompts)]
    body = {"prompt": asked, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/completions", {"model": server.model, **body}, timeout=240)
    assert answer.status_code == 200, answer.text
    return [str(choice["text"]) for choice in answer.json()["choices"]]


def test_one_bad_row_is_counted_and_the_engine_goes_on(server: Server, triggers: Path) -> None:
    """Nothing else tells that a token of this answer is arbitrary."""
    texts(server, 4)
    assert server.metric("engine_nan_rows_total") == 0
    (triggers / "row").touch()
    texts(server, 4)
    assert not (triggers / "row").exists()
    assert server.metric("engine_nan_rows_total") == 1
    assert server.metric("engine_generation") == 1


def test_an_engine_without_a_sound_row_is_replaced(server: Server, triggers: Path) -> None:
    """The death has a cause of its own, its rows stay counted, and the answers are sound."""
    sound = texts(server, LOST_ROWS)
    (triggers / "step").touch()
    assert texts(server, LOST_ROWS) == sound
    assert server.metric("engine_deaths_total", cause="nan_logits") == 1
    assert server.metric("engine_generation") == 2
    assert server.metric("engine_nan_rows_total") >= LOST_ROWS
    assert "none of the last" in server.status["engine"]["last_exit"]
