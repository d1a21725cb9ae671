"""Has a request keep its capacity from the first token of a beam search to the last.

vLLM makes an engine request for each beam and token (`BeamSearchOnlineMixin.beam_search`, 0.32,
0.33).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin

from holdfast.patches.patch import original, replace
from holdfast.request_context import current_request


def mark_beam_searches() -> None:
    """Tell a request when each of its beam searches begins and ends; idempotent."""
    as_vllm = original(BeamSearchOnlineMixin, "beam_search")

    async def beam_search(self: Any, *args: Any, **options: Any) -> AsyncGenerator[Any, None]:
        with current_request().searching():
            outputs = [output async for output in as_vllm(self, *args, **options)]
        for output in outputs:
            yield output

    replace(BeamSearchOnlineMixin, "beam_search", beam_search)
