"""A bug for requests to meet: `--logits-processors hostile.poison:Poison`, in each worker.

It stands for any native code that one request can break. It remembers nothing but what a request
says, so an engine that starts again is whole until it meets such a request again.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.sample import logits_processor as of_second_runner

STALL_SECONDS = 600
LEAK_BYTES = 64 << 20
_leaked: list[bytes] = []


class PoisonError(Exception):
    """A request asked for it."""


def end(how: str) -> None:
    """End this process, or have it end itself, in the way that is asked for; a leak only grows."""
    if how == "leak":
        _leaked.append(b"1" * LEAK_BYTES)
        return
    if how == "SEGV":
        ctypes.string_at(0)  # the kernel sends the signal, not a process
    if how == "ABRT":
        os.abort()
    if how == "raise":
        raise PoisonError(how)
    if how == "KILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(1)
    if how == "stall":
        time.sleep(STALL_SECONDS)
    # As a trap or a broken mapping ends a process: by the kernel's own, in the thread that did it.
    number = signal.Signals[f"SIG{how}"]
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


class Poison(LogitsProcessor, of_second_runner.LogitsProcessor):  # type: ignore[misc]  # vLLM is Any to us
    """Ends its worker when a request with `end_by` among its `vllm_xargs` is to be sampled.

    The V1 model runner says which requests are in its batch, V2 in which places of it they are.
    """

    def __init__(self, *_: Any) -> None:
        self._endings: list[str] = []
        self._by_place: dict[int, str] = {}

    def is_argmax_invariant(self) -> bool:
        """It would not be called for greedy requests if it were."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Learn of the requests that came to V1."""
        added = batch_update.added if batch_update else ()
        self._endings = [_ending(parameters) for _, parameters, *_ in added]

    def add_request(self, place: int, parameters: Any) -> bool:
        """Learn of a request that came to V2, and that its logits are to pass through here."""
        self._by_place[place] = _ending(parameters)
        return True

    def apply(self, logits: Any, batch: Any = None) -> Any:
        """Leave the logits as they are, if this returns; V2 says of what `batch`."""
        endings = self._endings
        if batch is not None:
            endings = [self._by_place.pop(int(place), "") for place in batch.idx_mapping_np]
        for ending in filter(None, endings):
            end(ending)
        return logits


def _ending(parameters: Any) -> str:
    return str((parameters.extra_args or {}).get("end_by") or "")
