"""Steps as vLLM's scheduler describes them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from holdfast.worker.step_requests import read_suspects


def step(*names: str) -> SimpleNamespace:
    """As vLLM's scheduler describes it: requests in the middle of their answers."""
    count = len(names)
    cached = SimpleNamespace(
        req_ids=list(names), num_computed_tokens=[10] * count, num_output_tokens=[3] * count
    )
    return SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=dict.fromkeys(names, 1),
    )


def names(directory: Path, engine: int = 0) -> list[tuple[str, bool]]:
    """Who may have ended an engine, and whether it was in a step that had not ended."""
    found = read_suspects(directory).get(engine, ())
    return [(suspect.request_id, suspect.is_in_running_step) for suspect in found]
