"""The scratch buffer of each slot: how it is made, grows and is retired, and the views into it.

Two ubatches run the same layers, but vLLM's metadata builders and its unsplit dummy runs use only
slot 0. So once a manager is bound, a growth before the lock makes the slots of all ubatches of that
lane equal at once: early enough for the sizing of the KV cache and for the addresses of the graphs.
Another ubatch may be running and hold views into its old buffer, which keep that alive until the
step is over. vLLM's comment on `_ensure_workspace_size` warns of that peak. It shrinks the KV cache
by at most the old buffer, at a first start without a reservation. Equalizing later would be worse:
the peak that the profile measures would not contain what it adds.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from types import FrameType
from typing import NoReturn

import torch

from holdfast.errors import HoldfastError
from holdfast.records import Rejection
from holdfast.workspace.accounting import RetainedMemory
from holdfast.workspace.growth import GrowthGate, scratch_message
from holdfast.workspace.plan import MIB, Slot, round_up

_OWN_MODULES = frozenset(
    {
        __name__,
        "holdfast.workspace.manager",
        "holdfast.workspace.resources",
        "vllm.v1.worker.workspace",
    }
)


def outside_caller() -> str:
    """Return the nearest caller outside the workspace manager."""
    return nearest_caller(lambda frame: frame.f_globals.get("__name__") not in _OWN_MODULES)


def nearest_caller(is_outside: Callable[[FrameType], bool]) -> str:
    """Return `file.py:line:function` of the nearest caller whose frame `is_outside` accepts."""
    frame = inspect.currentframe()
    frame = frame.f_back if frame else None
    while frame is not None and not is_outside(frame):
        frame = frame.f_back
    if frame is None:
        return "unknown"
    code = frame.f_code
    _, _, file_name = code.co_filename.rpartition("/")
    return f"{file_name}:{frame.f_lineno}:{code.co_name}"


TensorSpec = tuple[tuple[int, ...], torch.dtype]
MAX_MEMO_ENTRIES = 1024
"""Specs that a slot remembers, in a few MiB of host memory. A full memo is cleared."""
_ALIGNMENT_BYTES = 256
logger = logging.getLogger(__name__)


def spec_bytes(specs: Iterable[TensorSpec]) -> int:
    """Return what `get_simultaneous` needs for `specs`, each aligned to 256 bytes as in vLLM."""
    return sum(round_up(prod(shape) * dtype.itemsize, _ALIGNMENT_BYTES) for shape, dtype in specs)


@dataclass(frozen=True, slots=True)
class Allocator:
    """Allocates buffers in vLLM's context for workspaces, where its sleep mode finds them."""

    device: torch.device
    context: Callable[[], AbstractContextManager[object]]

    def buffer(self, size_bytes: int, *, is_touched: bool) -> torch.Tensor:
        """Return a new buffer; `is_touched` makes it resident on the CPU."""
        with self.context(), torch.inference_mode(mode=False):
            buffer = torch.empty((size_bytes,), dtype=torch.uint8, device=self.device)
        if is_touched and self.device.type == "cpu":
            buffer.zero_()
        return buffer

    def trim(self) -> None:
        """Free what was dropped in sleep mode: vLLM's pool keeps it until the next entry."""
        with self.context():
            pass

    def empty_cache(self) -> None:
        """Return cached memory to the device, so that it can serve an allocation of any size."""
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()


class ScratchBuffers:
    """The current buffer of each slot of a manager, and the views into it."""

    def __init__(
        self,
        current: list[torch.Tensor | None],
        slots: Sequence[Slot],
        allocator: Allocator,
        gate: GrowthGate,
        retained: RetainedMemory,
    ) -> None:
        """Manage `current`, which is vLLM's own list of buffers."""
        self.memos: list[dict[tuple[TensorSpec, ...], tuple[torch.Tensor, ...]]] = [
            {} for _ in slots
        ]
        self._current = current
        self._slots = tuple(slots)
        self._num_lanes = 1 + max(lane for _, lane in slots)
        self._allocator = allocator
        self._accounting = gate.accounting
        self._gate = gate
        self._retained = retained

    def reserve(self, index: int, size_bytes: int) -> None:
        """Make the slot at least this large.

        Raises:
            HoldfastError: it is smaller, and the manager is locked.
        """
        with self._gate.changing:
            if self._accounting.size_bytes[index] < size_bytes:
                self._enlarge(index, size_bytes)
            self._accounting.set_reserved(index, size_bytes)

    def equalize_ubatches(self) -> None:
        """Make the slots of each lane as large as the largest of them, except after the lock."""
        with self._gate.changing:
            for index in range(len(self._slots)):
                size_bytes = self._equalized_bytes(index)
                if self._accounting.size_bytes[index] < size_bytes:
                    self._replace(index, size_bytes, is_touched=True)

    def new_views(self, index: int, specs: tuple[TensorSpec, ...]) -> list[torch.Tensor]:
        """Return views into the slot, one per spec, that do not overlap, and remember them."""
        ends = [*accumulate((spec_bytes((spec,)) for spec in specs), initial=0)]
        self._accounting.record_request(index, ends[-1], outside_caller())
        buffer = self.buffer_of(index, ends[-1])
        with torch.inference_mode(mode=False):  # remembered views must serve in either mode
            views = tuple(
                buffer[start : start + prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
                for (shape, dtype), start in zip(specs, ends, strict=False)
            )
        self.remember(index, buffer, specs, views)
        return [*views]

    def remember(
        self,
        index: int,
        buffer: torch.Tensor,
        specs: tuple[TensorSpec, ...],
        views: tuple[torch.Tensor, ...],
    ) -> None:
        """Return `views` for `specs` from now on, while the slot has this buffer."""
        # The memo is read first: a slot changes its buffer first and its memo second, so the views
        # of a buffer that another thread replaces end in no memo, or in one that is dropped.
        memo = self.memos[index]
        if self._current[index] is not buffer:
            return
        if len(memo) >= MAX_MEMO_ENTRIES:
            memo.clear()
        with contextlib.suppress(TypeError):  # a shape that is a list
            memo[specs] = views

    def buffer_of(self, index: int, required_bytes: int) -> torch.Tensor:
        """Return the buffer of the slot, grown to `required_bytes` if necessary and allowed."""
        current = self._current[index]
        if current is not None and current.numel() >= required_bytes:
            return current
        del current  # otherwise its memory could not serve the larger one
        if not required_bytes:  # a request for nothing neither grows nor is refused
            return torch.empty(0, dtype=torch.uint8, device=self._allocator.device)
        return self._grow(index, required_bytes, outside_caller())

    def _grow(self, index: int, required_bytes: int, caller: str) -> torch.Tensor:
        with self._gate.changing:
            self._accounting.record_request(index, required_bytes, caller)
            current = self._current[index]
            if current is not None and current.numel() >= required_bytes:
                return current  # another thread has reserved it meanwhile
            del current
            reason = self._gate.reason_against(required_bytes)
            if reason:
                self._refuse(index, required_bytes, caller, reason)
            held_bytes = self._accounting.size_bytes[index]
            buffer = self._grown(index, required_bytes, caller)
            self._record_growth(index, held_bytes, caller)
            self.equalize_ubatches()
            return buffer

    def _grown(self, index: int, required_bytes: int, caller: str) -> torch.Tensor:
        # The final size at once: equalizing would otherwise retire the buffer just allocated.
        grown_bytes = self._gate.size_bytes(required_bytes)
        equalized_bytes = self._equalized_bytes(index)
        size_bytes = max(grown_bytes, equalized_bytes)
        try:
            return self._replace(index, size_bytes, is_touched=equalized_bytes > grown_bytes)
        except RuntimeError as error:  # the allocator's, torch.OutOfMemoryError among them
            if self._accounting.phase == "warmup":
                raise
            self._refuse(index, required_bytes, caller, f"out of memory: {error}")

    def _equalized_bytes(self, index: int) -> int:
        """Return the size of the largest slot of the lane; 0 if the slot may differ from it."""
        if self._accounting.is_locked or not self._gate.is_bound:
            return 0
        return max(self._accounting.size_bytes[index % self._num_lanes :: self._num_lanes])

    def _enlarge(self, index: int, size_bytes: int) -> None:
        if self._accounting.is_locked:
            raise HoldfastError(
                f"Workspace {self._slots[index]} holds {self._accounting.size_bytes[index]} bytes "
                f"and is locked: it is too late to reserve {size_bytes} bytes.",
                remedy="reserve it in the constructor or the warm-up of the model.",
            )
        is_growth = self._current[index] is not None
        self._replace(index, size_bytes, is_touched=True)
        if is_growth:
            self._accounting.record_growth(self._accounting.phase)

    def _replace(self, index: int, size_bytes: int, *, is_touched: bool) -> torch.Tensor:
        """Put a buffer of `size_bytes` into the slot; after the lock, an error leaves the old size.

        Before the seal and the lock, the old one is freed first, as in vLLM, for a lower peak.
        """
        if self._accounting.phase == "warmup":
            self._free(index)
        try:
            buffer = self._allocator.buffer(size_bytes, is_touched=is_touched)
        except RuntimeError:
            if self._accounting.is_sealed or self._current[index] is None:
                raise
            return self._replace_in_its_memory(index, size_bytes)
        old = self._current[index]
        self._install(index, buffer)
        self._retained.retire(() if old is None else (old,))
        if old is not None and not self._accounting.is_sealed:
            del old
            self._allocator.trim()
        return buffer

    def _replace_in_its_memory(self, index: int, size_bytes: int) -> torch.Tensor:
        """Free the old buffer before the new one is made, or have one of its size again."""
        held_bytes = self._accounting.size_bytes[index]
        self._free(index)
        try:
            buffer = self._allocator.buffer(size_bytes, is_touched=False)
        except RuntimeError:
            self._install(index, self._allocator.buffer(held_bytes, is_touched=False))
            raise
        self._install(index, buffer)
        return buffer

    def _free(self, index: int) -> None:
        self._install(index, None)
        self._allocator.empty_cache()

    def _install(self, index: int, buffer: torch.Tensor | None) -> None:
        self._current[index] = buffer
        self.memos[index] = {}
        self._accounting.set_size(index, 0 if buffer is None else buffer.numel())

    def _record_growth(self, index: int, held_bytes: int, caller: str) -> None:
        phase = self._accounting.phase
        self._accounting.record_growth(phase)
        logger.log(
            logging.INFO if phase == "warmup" else logging.WARNING,
            "Workspace %s grew for '%s' (%s): %.2f MB -> %.2f MB",
            self._slots[index],
            caller,
            phase,
            held_bytes / MIB,
            self._accounting.size_bytes[index] / MIB,
        )

    def _refuse(self, index: int, required_bytes: int, caller: str, reason: str) -> NoReturn:
        held_bytes = self._accounting.size_bytes[index]
        rejection = Rejection("scratch", caller, required_bytes, held_bytes, reason)
        self._gate.refuse(rejection, scratch_message(rejection, self._accounting.phase))
