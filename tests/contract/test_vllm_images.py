"""What vLLM says of the images that a model takes: real processors, no engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.usage.usage_lib import UsageContext

import tiny_models
from holdfast.engine.model.facts import engine_facts


@pytest.fixture(scope="module")
def blip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes images."""
    return tiny_models.make_blip(tmp_path_factory.mktemp("models") / "blip")


def largest_image(model: Path, **flags: Any) -> tuple[int, int] | None:
    """What our facts say of the model under these flags."""
    arguments = AsyncEngineArgs(model=str(model), enforce_eager=True, max_model_len=512, **flags)
    config = arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)

    def processor() -> Any:
        return MULTIMODAL_REGISTRY.create_processor(config.model_config)

    renderer = SimpleNamespace(tokenizer=None, get_mm_processor=processor)
    facts = engine_facts(
        SimpleNamespace(vllm_config=config, renderer=renderer),
        frozenset({"generate"}),
        fingerprint="",
        has_template=True,
        is_unified=False,
    )
    return facts.largest_image


def test_largest_image_is_the_one_that_measures_the_encoder(blip: Path) -> None:
    """Its size is that of vLLM's own dummy, also where a flag makes that smaller."""
    pixels = tiny_models.IMAGE_PIXELS
    assert largest_image(blip) == (pixels, pixels)
    small = {"image": {"count": 1, "width": 8, "height": 8}}
    assert largest_image(blip, limit_mm_per_prompt=small) == (pixels, pixels)


def test_no_image_is_shown_where_none_is_taken(blip: Path) -> None:
    """A limit of none is a model without images."""
    assert largest_image(blip, limit_mm_per_prompt={"image": 0}) is None
