"""Which limit of every answer does vLLM take from a generation config?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens

from holdfast.engine.model.facts import max_answer_tokens

ROOM_TOKENS = 99


class Model(SimpleNamespace):
    """A configuration of a model; the generation config of the model or folder has a limit of 7."""

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """Give the limit by the name of vLLM's parameter, as vLLM does."""
        limit = self.override_generation_config.get("max_new_tokens", 7)
        return {} if limit is None else {"max_tokens": limit}


@pytest.mark.parametrize("source", ["auto", "vllm", "/a/folder"])
@pytest.mark.parametrize(
    "override", [{}, {"max_new_tokens": 10}, {"max_new_tokens": None}], ids=str
)
def test_an_answer_is_cut_where_the_probe_expects_it(source: str, override: dict[str, Any]) -> None:
    """Whatever a client asks for."""
    model: Any = Model(generation_config=source, override_generation_config=override)
    client: Any = SimpleNamespace(
        model_config=model, renderer=None, input_processor=None, vllm_config=None
    )
    nothing: Any = None
    routes = OpenAIServingCompletion(client, nothing, online_renderer=nothing, request_logger=None)
    limits = routes.default_sampling_params, routes.override_max_tokens
    cut = get_max_tokens(ROOM_TOKENS + 1, ROOM_TOKENS, 1, *limits)
    assert cut == (max_answer_tokens(model) or ROOM_TOKENS)
