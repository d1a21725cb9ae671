"""How many prompts may one request have? Known before any of them is rendered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError

_MARK = "holdfast_most_prompts"


def bound_prompts(renderer: Any, most: float) -> None:
    """Have `renderer` refuse more prompts than that at once; calling it again changes nothing.

    vLLM 0.32 bounds those of a completion, but neither the inputs of embeddings nor of scores. A
    body of 32 MiB has room for eight million, each of which is rendered by itself.
    """
    if hasattr(renderer, _MARK):
        return
    setattr(renderer, _MARK, most)
    render = renderer.render_cmpl_async

    async def render_bounded(prompts: Sequence[Any], *arguments: Any, **options: Any) -> Any:
        if len(prompts) > most:
            raise VLLMValidationError(
                f"The request has {len(prompts)} prompts; at most {most:g} are allowed."
            )
        return await render(prompts, *arguments, **options)

    renderer.render_cmpl_async = render_bounded
