"""Keeps what vLLM makes of images and other media in the front end, and not in the engine.

A chat sends its images again with each turn. With one front end, vLLM keeps a processed item in
EngineCore, and sends only a reference to it later. So a request with such a reference is lost with
its engine: no other engine has the item. The cache that vLLM uses with several front ends is in the
front end, is as large, and sends the item each time (`vllm.multimodal.cache.factories`, 0.32).

Importing this module is cheap: the function imports what it changes.
"""

from __future__ import annotations

from typing import Any

from holdfast.patches.patch import original, replace


def keep_media_in_front_end() -> None:
    """Have this process, whether front end, EngineCore or worker, use the cache in the front end.

    All processes have to agree: one with a cache of its own would wait for references.
    """
    from vllm.multimodal.cache import factories  # noqa: PLC0415 - see the module's docstring

    cache_type = original(factories, "_get_cache_type")

    def in_front_end(vllm_config: Any) -> str | None:
        return None if cache_type(vllm_config) is None else "processor_only"

    replace(factories, "_get_cache_type", in_front_end)
