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

STALL_SECONDS = 600


class PoisonError(Exception):
    """A request asked for it."""


def end(how: str) -> None:
    """End this process, or have it end itself, in the way that is asked for."""
    if how == "SEGV":
        ctypes.string_at(0)  # the kernel sends the signal, not somebody
    if how == "ABRT":
        os.abort()
    if how == "raise":
        raise PoisonError(how)
    if how == "stall":
        time.sleep(STALL_SECONDS)
    # As a trap or a broken mapping ends a process: by the kernel's own, in the thread that did it.
    number = signal.Signals[f"SIG{how}"]
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


class Poison(LogitsProcessor):  # type: ignore[misc]  # vLLM is Any to us
    """Ends its worker when a request with `end_by` among its `vllm_xargs` is to be sampled."""

    def __init__(self, *_: Any) -> None:
        self._endings: list[str] = []

    def is_argmax_invariant(self) -> bool:
        """It would not be called for greedy requests if it were."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Learn of the requests that came."""
        added = batch_update.added if batch_update else ()
        said = ((parameters.extra_args or {}).get("end_by") for _, parameters, *_ in added)
        self._endings = [ending for ending in said if ending]

    def apply(self, logits: Any) -> Any:
        """Leave the logits as they are, if this returns."""
        for ending in self._endings:
            end(ending)
        return logits
