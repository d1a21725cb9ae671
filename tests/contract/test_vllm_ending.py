"""What vLLM logs when its engine is ended on purpose."""

from __future__ import annotations

import asyncio
import logging
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import async_llm
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import OutputProcessor

from holdfast.engine.checked_llm import CheckedLLM


async def ended(*, is_reading_stopped: bool) -> None:
    """An engine that is idle, until its reader ends, which vLLM cancels as it shuts down."""
    ending: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    llm: Any = CheckedLLM.__new__(CheckedLLM)
    llm.engine_core = SimpleNamespace(get_output_async=lambda: ending, shutdown=lambda **_: None)
    llm.output_processor = OutputProcessor(None, log_stats=False)
    llm.log_stats, llm.logger_manager, llm.output_handler = False, None, None
    llm.renderer = SimpleNamespace(mm_processor_cache=None, shutdown=lambda: None)
    AsyncLLM._run_output_handler(llm)
    await asyncio.sleep(0)
    if is_reading_stopped:
        llm.stop_reading()
    if not ending.done():
        ending.set_exception(EngineDeadError())
    await asyncio.wait({llm.output_handler})
    llm.output_handler = None  # or vLLM cancels it once more, on a loop that is closed


@pytest.mark.parametrize(("is_reading_stopped", "count"), [(True, 0), (False, 1)])
def test_an_engine_that_is_ended_on_purpose_logs_no_failure(
    *, count: int, is_reading_stopped: bool
) -> None:
    """Once vLLM logs none either way, `stop_reading` can go."""
    said = StringIO()
    handler, logger = logging.StreamHandler(said), logging.getLogger(async_llm.__name__)
    logger.addHandler(handler)
    try:
        asyncio.run(ended(is_reading_stopped=is_reading_stopped))
    finally:
        logger.removeHandler(handler)
    assert said.getvalue().count("output_handler failed") == count
