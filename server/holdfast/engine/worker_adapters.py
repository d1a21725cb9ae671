"""Keeps the LoRA adapters of all workers alike, in whichever engine runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from vllm.exceptions import VLLMNotFoundError
from vllm.lora.utils import get_adapter_absolute_path
from vllm.v1.engine.exceptions import EngineDeadError

from holdfast.engine.model.identity import AdapterFiles
from holdfast.engine.replay import ReplayManager
from holdfast.engine.rpc import ask_workers, call_workers
from holdfast.errors import (
    EngineLostError,
    EngineRefusedError,
    HoldfastError,
    RequestLostError,
)

MAX_LOADING_SECONDS = 300.0
"""Enough to read an adapter from a slow disk, or for another node to download it."""
DOWNLOADS_AT_ONCE = 8

OnLost = Callable[[Any, HoldfastError], None]
"""Receives the record of an adapter that the workers no longer have, and why."""
_DEATHS: ContextVar[list[EngineDeadError] | None] = ContextVar("deaths during loads", default=None)


class WorkerAdapters:
    """Has every worker load an adapter, or none."""

    def __init__(self, requests: ReplayManager) -> None:
        self._requests = requests
        self._files = AdapterFiles()
        # The end of the loop would wait for its own executor, and a download cannot be cancelled.
        self._downloader = ThreadPoolExecutor(DOWNLOADS_AT_ONCE, thread_name_prefix="adapters")
        self._loaded: dict[int, Any] = {}
        """vLLM's record of each adapter that every worker has loaded, by ID."""
        self._runs = WeakKeyDictionary[Any, Any]()
        """vLLM's record of the adapter of each request, by the generator of its outputs."""
        self._calls = 0
        self._called_since_seconds = 0.0
        self.on_lost: OnLost = lambda _record, _error: None

    @property
    def stops_steps(self) -> bool:
        """Whether the engine makes no steps because workers load an adapter, within limits."""
        called_seconds = time.monotonic() - self._called_since_seconds
        return self._calls > 0 and called_seconds < MAX_LOADING_SECONDS

    def require(self, record: Any) -> None:
        """Raise VLLMNotFoundError, as for an unknown model, if workers do not have an adapter.

        A request may come with one that has been unloaded since its route found it.
        """
        if record.lora_int_id not in self._loaded:
            raise VLLMNotFoundError(f"The model `{record.lora_name}` does not exist.")

    def note_use(self, outputs: Any, record: Any) -> None:
        """Count an adapter as used until a generator ends, or nobody keeps it any more."""
        self._runs[outputs] = record

    def used(self) -> list[Any]:
        """Return the records of the adapters that requests need, also before the engine has them.

        A request may wait for its route, for its grammar, for an engine or for its trial.
        """
        runs = [record for outputs, record in self._runs.items() if outputs.ag_frame is not None]
        given = (arguments.get("lora_request") for arguments in self._requests.arguments())
        return [*runs, *filter(None, given)]

    async def load(
        self, current: Callable[[], Any], record: Any, *, is_stale: bool = False
    ) -> None:
        """Load an adapter into every worker, or leave every worker as it was.

        If its files are not those of the last time, no stream with it goes on in another engine.
        `current` returns the engine in use: it may be another one after a download.

        Raises:
            EngineRefusedError: a worker rejected it.
            EngineDeadError: the engine died meanwhile, or none is in use.
        """
        lora_id = record.lora_int_id
        if self._loaded.get(lora_id) is not record:
            await self._download(record.lora_path)
        with self._calling(), _deaths_noted():
            llm = current()
            errors = await _ask_to_load(llm, record, is_reloading=record.load_inplace or is_stale)
            if any(errors):
                await self._undo(llm, record, is_in_some=not all(errors))
                raise EngineRefusedError(next(filter(None, errors)))
        # vLLM keeps the record, and would load the adapter again in each step that needs it.
        record.load_inplace = False
        self._loaded[lora_id] = record
        # Only now, since workers load what there is by then.
        if await self._files.have_changed(lora_id, record.lora_path):
            lost = RequestLostError("The LoRA adapter has changed since this answer began.")
            self._requests.refuse(lambda it: it.has_yielded and uses(it.arguments, lora_id), lost)

    async def remove(self, llm: Any, lora_id: int) -> None:
        """Remove an adapter from every worker that has it.

        Raises:
            EngineRefusedError: a worker could not.
        """
        self._loaded.pop(lora_id, None)
        await call_workers(llm, "remove_lora", lora_id=lora_id)

    def forget_all_but(self, lora_ids: Collection[int]) -> None:
        """Forget which all adapters but these were, and their files."""
        self._files.forget_all_but(lora_ids)
        self._loaded = {one: record for one, record in self._loaded.items() if one in lora_ids}

    async def _download(self, path: str) -> None:
        """Have the Hub's cache hold an adapter before workers load it, and make no step."""
        downloading = asyncio.get_running_loop().run_in_executor(
            self._downloader, get_adapter_absolute_path, path
        )
        # The workers meet the same error, and name it as vLLM's routes know it.
        await asyncio.gather(downloading, return_exceptions=True)

    @contextmanager
    def _calling(self) -> Iterator[None]:
        # Since the first of several calls: an engine that answers none must be found out.
        if not self._calls:
            self._called_since_seconds = time.monotonic()
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    async def _undo(self, llm: Any, record: Any, *, is_in_some: bool) -> None:
        """Take an adapter from the workers that have loaded it; those that failed are as before."""
        lora_id = record.lora_int_id
        earlier = self._loaded.get(lora_id)
        if earlier is None or earlier is record:
            with suppress(EngineRefusedError):
                await self.remove(llm, lora_id)
        elif is_in_some:
            errors = await _ask_to_load(llm, earlier, is_reloading=True)
            if any(errors):
                self.on_lost(earlier, EngineRefusedError(next(filter(None, errors))))
                with suppress(EngineRefusedError):
                    await self.remove(llm, lora_id)


@contextmanager
def deaths_raised() -> Iterator[None]:
    """Have vLLM's own routines for adapters raise the death of an engine that ends a load.

    They make a text of whatever a load raises, and then it looks as if the adapter were wrong.

    Raises:
        EngineLostError: the engine died during a load, or none was in use.
    """
    deaths: list[EngineDeadError] = []
    noting = _DEATHS.set(deaths)
    try:
        yield
    except ValueError:  # that of adapters on the command line
        if not deaths:
            raise
    finally:
        _DEATHS.reset(noting)
    if deaths:
        raise EngineLostError(
            "the engine died before it had the adapter.", remedy="try again when it is replaced."
        ) from deaths[0]


@contextmanager
def _deaths_noted() -> Iterator[None]:
    try:
        yield
    except EngineDeadError as error:
        if (deaths := _DEATHS.get()) is not None:
            deaths.append(error)
        raise


async def _ask_to_load(llm: Any, record: Any, *, is_reloading: bool) -> list[str]:
    """Have every worker load an adapter, and return the error of each; empty if it has loaded."""
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    return await ask_workers(llm, "add_lora", **{**fields, "load_inplace": is_reloading})


def uses(arguments: Mapping[str, Any], lora_id: int) -> bool:
    """Whether a request with these arguments needs this adapter."""
    return getattr(arguments.get("lora_request"), "lora_int_id", None) == lora_id
