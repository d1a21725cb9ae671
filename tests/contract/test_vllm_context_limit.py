"""Where vLLM's front end reads how long a request may be: at each request, of these objects."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
from vllm.entrypoints.generate.base import serving as generate
from vllm.entrypoints.openai.chat_completion import serving as chat
from vllm.entrypoints.openai.completion import serving as completions
from vllm.entrypoints.openai.models import serving as models
from vllm.entrypoints.openai.responses import serving as responses
from vllm.renderers import base as renderers
from vllm.v1.engine import async_llm, input_processor

from holdfast.engine.proxy import EngineProxy


@pytest.mark.parametrize("module", [chat, completions, models, responses, input_processor])
def test_the_length_is_read_at_each_request(module: object) -> None:
    """It is not a copy of the number that was made when the server was built."""
    source = inspect.getsource(module)  # type: ignore[arg-type]  # a module
    assert "self.model_config.max_model_len" in source
    assert "self.max_model_len" not in source


def test_the_renderer_reads_its_own_configuration() -> None:
    """It outlives its engine, and so does that."""
    source = inspect.getsource(renderers)
    assert "self.model_config = config.model_config" in source
    assert "max_total_tokens=model_config.max_model_len" in source


def test_serving_objects_have_the_configuration_of_the_engine_they_were_built_with() -> None:
    """And each engine has one for itself and its input processor."""
    assert "model_config=engine_client.model_config" in inspect.getsource(generate)
    assert "self.model_config = vllm_config.model_config" in inspect.getsource(async_llm)
    assert "self.model_config = model_config = vllm_config.model_config" in inspect.getsource(
        input_processor
    )


def an_engine(renderer: SimpleNamespace | None = None) -> SimpleNamespace:
    """The attributes of an AsyncLLM that the proxy keeps, with a configuration of its own."""
    model = SimpleNamespace(max_model_len=1000)
    return SimpleNamespace(
        vllm_config=None,
        model_config=model,
        renderer=renderer or SimpleNamespace(model_config=model),
        input_processor=SimpleNamespace(model_config=model),
    )


def test_a_limit_reaches_every_configuration_that_is_read() -> None:
    """That of the first renderer, that of the first engine in use, and that of the last."""
    proxy = EngineProxy()
    lost = an_engine()
    first = an_engine(lost.renderer)
    last = an_engine(lost.renderer)
    proxy.use(first)
    proxy.limit_context(500)
    proxy.use(None)
    proxy.use(last)
    proxy.limit_context(700)
    read = (lost.renderer, first, last, last.input_processor)
    assert [reader.model_config.max_model_len for reader in read] == [700] * 4
