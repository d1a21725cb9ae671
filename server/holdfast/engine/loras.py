"""Serves LoRA adapters that outlive the engine: each generation loads them again.

The list belongs to vLLM's serving models, which live as long as the front end. It includes adapters
from the command line, from a resolver, and from vLLM's own runtime route. This module remembers
only which of them are pinned.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any

from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest

from holdfast.engine.proxy import EngineProxy
from holdfast.engine.rpc import call_workers, rpc_deadline
from holdfast.engine.worker_adapters import deaths_raised, uses
from holdfast.errors import (
    ConflictError,
    EngineLostError,
    EngineSilentError,
    HoldfastError,
    NotFoundError,
    RequestLostError,
    UsageError,
)
from holdfast.records import Lora

logger = logging.getLogger("holdfast.engine")

LOAD_DEADLINE_SECONDS = 300.0
"""Enough to download an adapter."""
UNUSED_DEADLINE_SECONDS = 30.0
POLL_SECONDS = 0.2


class Loras:
    """Manages the adapters of one server through whichever engine runs."""

    def __init__(self, proxy: EngineProxy, *, is_enabled: bool) -> None:
        self._proxy = proxy
        self._is_enabled = is_enabled
        self._models: Any | None = None
        # By ID, which vLLM gives to no other adapter, not by name: its own routes change the list.
        self._pinned: set[int] = set()
        self._removals: set[asyncio.Task[None]] = set()
        proxy.adapters.on_lost = self._stop_serving

    def attach(self, models: Any) -> None:
        """Use vLLM's serving models, which hold the list."""
        self._models = models

    @property
    def stops_steps(self) -> bool:
        """Whether the engine makes no steps because its workers load an adapter."""
        return self._proxy.adapters.stops_steps

    def listed(self) -> tuple[Lora, ...]:
        """Return every adapter in order of loading. Never waits for the engine."""
        requests = self._models.lora_requests if self._models else {}
        return tuple(map(self._as_listed, requests.values()))

    async def load(self, name: str, path: str, *, is_replacing: bool) -> Lora:
        """Have the engine load an adapter, and list it.

        Raises:
            ConflictError: LoRA is off, or the name is taken. UsageError, NotFoundError: the
                adapter does not exist or is unusable. EngineLostError, EngineSilentError: the
                engine did not answer.
        """
        models = self._require_enabled()
        if name in models.lora_requests and not is_replacing:
            raise ConflictError(
                f"There is a LoRA adapter {name!r} already.",
                remedy="add `replace: true` to replace it, or choose another name.",
            )
        request = LoadLoRAAdapterRequest(lora_name=name, lora_path=path, load_inplace=is_replacing)
        async with rpc_deadline("load the adapter", LOAD_DEADLINE_SECONDS):
            with deaths_raised():
                answer = await models.load_lora_adapter(request)
        if isinstance(answer, ErrorResponse):
            raise _refusal(answer)
        return self._as_listed(models.lora_requests[name])

    async def unload(self, name: str) -> None:
        """Unlist an adapter, and remove it from the engine once no request needs it.

        This returns before that if it takes long.

        Raises:
            ConflictError: LoRA is off. NotFoundError: it is not listed.
        """
        models = self._require_enabled()
        lora_id = self._request_of(name).lora_int_id
        answer = await models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=name))
        if isinstance(answer, ErrorResponse):
            raise _refusal(answer)
        self._pinned.discard(lora_id)
        removal = asyncio.create_task(self._remove_unused(name, lora_id), name=f"unload {name}")
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)
        await asyncio.wait({removal}, timeout=UNUSED_DEADLINE_SECONDS)
        if not removal.done():
            logger.info(
                "LoRA %s was removed from the list and is unloaded after its last request", name
            )

    async def pin(self, name: str) -> Lora:
        """Keep an adapter on the device, also in later generations, unless others need all slots.

        Raises:
            ConflictError: LoRA is off, or there is not enough room to pin another.
            NotFoundError: it is not listed.
        """
        models = self._require_enabled()
        request = self._request_of(name)
        await self._remove_unlisted_pins(models)
        await self._pin(request.lora_int_id)
        self._pinned.add(request.lora_int_id)
        return self._as_listed(request)

    async def restore(self, *, is_stale: bool = False) -> None:
        """Give the running engine every adapter that is listed, or that a request still needs.

        Those that it rejects are unlisted, and requests with them refused. `is_stale` says that it
        has adapters whose weights are lost.
        """
        needed = self._needed()
        self._proxy.adapters.forget_all_but({one.lora_int_id for one in needed})
        for request in needed:
            try:
                async with rpc_deadline(f"load LoRA {request.lora_name}"):
                    await self._proxy.add_lora(request, is_stale=is_stale)
            except (EngineLostError, EngineSilentError) as error:
                logger.warning("LoRA %s could not be loaded again: %s", request.lora_name, error)
                return  # the next generation gets them all
            except HoldfastError as error:
                self._stop_serving(request, error)
                continue
            if request.lora_int_id in self._pinned and self._is_listed(request):
                await self._pin_again(request)

    def _needed(self) -> list[Any]:
        """Return vLLM's records of adapters, those that are listed first, in order of loading.

        A step that needs any other one loads it, and ends the engine if its files are gone.
        """
        listed = self._models.lora_requests.values() if self._models else ()
        found: dict[int, Any] = {}
        for request in (*listed, *self._proxy.adapters.used()):
            found.setdefault(request.lora_int_id, request)
        return list(found.values())

    async def _remove_unused(self, name: str, lora_id: int) -> None:
        """Remove an adapter from whichever engine runs once no request needs it."""
        # A step that needs a missing adapter loads it, or ends the engine.
        while self._is_used(lora_id):  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(POLL_SECONDS)
        try:
            async with rpc_deadline("unload the adapter"):
                await self._proxy.adapters.remove(self._proxy, lora_id)
        except EngineLostError:
            pass  # the next one does not get it
        except HoldfastError as error:
            logger.warning("LoRA %s is unlisted, but stays in the engine: %s", name, error)

    async def _remove_unlisted_pins(self, models: Any) -> None:
        """Remove pinned adapters from the engine that vLLM's own route has unlisted."""
        listed = {request.lora_int_id for request in models.lora_requests.values()}
        for lora_id in self._pinned - listed:
            if not self._is_used(lora_id):
                async with rpc_deadline("unload the adapter"):
                    await self._proxy.adapters.remove(self._proxy, lora_id)
                self._pinned.discard(lora_id)

    async def _pin_again(self, request: Any) -> None:
        try:
            await self._pin(request.lora_int_id)
        except HoldfastError as error:
            self._pinned.discard(request.lora_int_id)
            logger.error("LoRA %s is no longer pinned: %s", request.lora_name, error)  # noqa: TRY400 - the error is an answer

    async def _pin(self, lora_id: int) -> None:
        try:
            async with rpc_deadline("pin the adapter"):
                await call_workers(self._proxy, "pin_lora", lora_id=lora_id)
        except HoldfastError as error:
            if error.http_status != HTTPStatus.INTERNAL_SERVER_ERROR:
                raise
            raise ConflictError(error.cause, remedy="raise --max-loras.") from error

    def _stop_serving(self, lora: Any, error: HoldfastError) -> None:
        name, lora_id = lora.lora_name, lora.lora_int_id
        logger.error("LoRA %s is no longer served: %s", name, error)
        if self._models is not None and self._is_listed(lora):
            del self._models.lora_requests[name]
        self._pinned.discard(lora_id)
        # Trying them would end one engine after another: a step that cannot load its adapter
        # raises.
        lost = RequestLostError(f"The LoRA adapter {name} could not be loaded again.")
        self._proxy.requests.refuse(lambda request: uses(request.arguments, lora_id), lost)

    def _is_listed(self, lora: Any) -> bool:
        """Whether this is the listed adapter of its name, and not an earlier one."""
        return self._models is not None and self._models.lora_requests.get(lora.lora_name) is lora

    def _is_used(self, lora_id: int) -> bool:
        return any(record.lora_int_id == lora_id for record in self._proxy.adapters.used())

    def _as_listed(self, request: Any) -> Lora:
        is_pinned = request.lora_int_id in self._pinned
        return Lora(request.lora_name, request.lora_path, is_pinned)

    def _require_enabled(self) -> Any:
        if not self._is_enabled:
            raise ConflictError("LoRA is off.", remedy="start with --enable-lora.")
        return self._models

    def _request_of(self, name: str) -> Any:
        request = self._models.lora_requests.get(name) if self._models else None
        if request is None:
            raise NotFoundError(
                f"There is no LoRA adapter {name!r}.", remedy="see GET /admin/loras for those."
            )
        return request


def _refusal(answer: ErrorResponse) -> HoldfastError:
    if answer.error.code == HTTPStatus.NOT_FOUND:
        return NotFoundError(
            answer.error.message,
            remedy="name a directory of the server's machine that has an adapter_config.json.",
        )
    return UsageError(answer.error.message, remedy="name an adapter that fits the model.")
