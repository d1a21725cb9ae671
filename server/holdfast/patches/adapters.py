"""Bounds what a request that names an unknown model can make vLLM do.

With `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1` vLLM (0.32) takes such a name for that of an adapter. It
keeps a lock for each name forever, and its resolver of directories joins the name to its own
directory, so `/etc` and `../..` lead out of it.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from pathlib import PurePosixPath
from typing import Any
from weakref import WeakValueDictionary

from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

from holdfast.patches.patch import original, replace

MAX_NAME_CHARACTERS = 255
"""The longest name of an adapter that is looked for."""


def bound_adapter_names() -> None:
    """Look for adapters only by names that stay below a directory, and keep no lock of them.

    Calling it again changes nothing.
    """
    begin_as_vllm = original(OpenAIServingModels, "__init__")
    resolve_as_vllm = original(OpenAIServingModels, "resolve_lora")

    def begin(self: Any, *args: Any, **options: Any) -> None:
        begin_as_vllm(self, *args, **options)
        self.lora_resolver_lock = _Locks()

    async def resolve(self: Any, lora_name: str) -> Any:
        if _stays_below(lora_name):
            return await resolve_as_vllm(self, lora_name)
        return create_error_response(
            "There is no LoRA adapter of this name.",
            err_type="NotFoundError",
            status_code=HTTPStatus.NOT_FOUND,
        )

    replace(OpenAIServingModels, "__init__", begin)
    replace(OpenAIServingModels, "resolve_lora", resolve)


class _Locks(WeakValueDictionary[str, asyncio.Lock]):
    """A lock for each name, kept while anyone holds it or waits for it."""

    def __getitem__(self, name: str) -> asyncio.Lock:
        return self.setdefault(name, asyncio.Lock())


def _stays_below(name: str) -> bool:
    path = PurePosixPath(name)
    is_short = len(name) <= MAX_NAME_CHARACTERS
    return is_short and not path.is_absolute() and ".." not in path.parts
