"""Which requests were in the step that ended an engine: written by the worker, read by anyone.

A front end that replays requests in the next generation has to know whom not to trust. Knows
neither vLLM nor torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast.records import Suspect

_NAME = "suspects.json"


def scheduled_requests(scheduler_output: Any) -> Iterator[Suspect]:
    """Every request in vLLM's `SchedulerOutput` (0.32, 0.33)."""
    scheduled_tokens = scheduler_output.num_scheduled_tokens
    for new in scheduler_output.scheduled_new_reqs:
        reached_tokens = new.num_computed_tokens + scheduled_tokens[new.req_id]
        yield Suspect(new.req_id, reached_tokens, is_prefill=True)
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, computed_tokens, made_tokens in zip(
        cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
    ):
        count = scheduled_tokens[request_id]
        drafts = len(scheduler_output.scheduled_spec_decode_tokens.get(request_id, ()))
        is_prefill = made_tokens == 0 or count > 1 + drafts
        yield Suspect(request_id, computed_tokens + count, is_prefill)


def write_suspects(directory: Path, suspects: Iterable[Suspect]) -> None:
    """Name them, whole or not at all; what another rank wrote before stays.

    Raises:
        OSError: the disk does not take it.
    """
    temporary = directory / f"{_NAME}.{os.getpid()}"
    temporary.write_text(json.dumps([asdict(suspect) for suspect in suspects]))
    with suppress(FileExistsError):
        (directory / _NAME).hardlink_to(temporary)
    temporary.unlink()


def read_suspects(directory: Path) -> tuple[Suspect, ...] | None:
    """What the first rank that failed wrote; None if none did."""
    try:
        written = json.loads((directory / _NAME).read_text())
    except (OSError, ValueError):
        return None
    return tuple(Suspect(**record) for record in written)
