"""The scratch buffer of each slot: how it is made, grows and is retired, and the views into it.

Two ubatches run the same layers, but vLLM's metadata builders and its unsplit dummy runs ask in
slot 0 alone. So once it is bound, what one ubatch needs before the lock every ubatch of its lane
gets, at once: early enough for the sizing of the KV cache and for the addresses of the graphs.
Another ubatch may run at that moment and hold views into its old buffer: they keep it alive until
the step is over. vLLM's comment on `_ensure_workspace_size` warns of that peak, which makes the KV
cache smaller by the old buffer at most, at a first start without a reservation. Levelling later
would be worse: what it adds would be missing in the peak that the profile has measured.
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
from holdfast.workspace.accounting import Holdings
from holdfast.workspace.growth import GrowthGate, scratch_message
from holdfast.workspace.plan import MIB, Slot, round_up

_INSIDE = frozenset(
    {
        __name__,
        "holdfast.workspace.manager",
        "holdfast.workspace.resources",
        "vllm.v1.worker.workspace",
    }
)


def asking_frame() -> str:
    """The nearest caller outside of the workspace manager."""
    return first_frame(lambda frame: frame.f_globals.get("__name__") not in _INSIDE)


def first_frame(is_outside: Callable[[FrameType], bool]) -> str:
    """`file.py:line:function` of the nearest caller's frame for which `is_outside` holds."""
    frame = inspect.currentframe()
    frame = frame.f_back if frame else None
    while frame is not None and not is_outside(frame):
        frame = frame.f_back
    if frame is None:
        return "unknown"
    code = frame.f_code
    _, _, file_name = code.co_filename.rpartition("/")
    return f"{file_name}:{frame.f_lineno}:{code.co_name}"


Spec = tuple[tuple[int, ...], torch.dtype]
MEMO_ENTRIES = 1024
"""Most specs that a slot remembers; its memo starts afresh beyond, at a few MiB of host memory."""
_ALIGNMENT_BYTES = 256
logger = logging.getLogger(__name__)


def spec_bytes(specs: Iterable[Spec]) -> int:
    """What `get_simultaneous` needs for `specs`: each aligned to 256 bytes, as in vLLM."""
    return sum(round_up(prod(shape) * dtype.itemsize, _ALIGNMENT_BYTES) for shape, dtype in specs)


@dataclass(frozen=True, slots=True)
class Allocator:
    """Makes buffers where vLLM's sleep mode looks for them: in its context for workspaces."""

    device: torch.device
    context: Callable[[], AbstractContextManager[object]]

    def buffer(self, size_bytes: int, *, is_touched: bool) -> torch.Tensor:
        """New bytes; on the CPU `is_touched` makes them resident, as no others are."""
        with self.context(), torch.inference_mode(mode=False):
            buffer = torch.empty((size_bytes,), dtype=torch.uint8, device=self.device)
        if is_touched and self.device.type == "cpu":
            buffer.zero_()
        return buffer

    def give_back(self) -> None:
        """Let what is free on the device serve an allocation of any size, as vLLM does."""
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()


class Scratch:
    """The current buffers of a manager, and the views that were handed out of each."""

    is_levelled = False
    """Whether the ubatches of a lane are kept alike."""

    def __init__(
        self,
        current: list[torch.Tensor | None],
        slots: Sequence[Slot],
        allocator: Allocator,
        gate: GrowthGate,
        holdings: Holdings,
    ) -> None:
        """`current` is vLLM's own list of buffers, which this keeps."""
        self.memos: list[dict[tuple[Spec, ...], tuple[torch.Tensor, ...]]] = [{} for _ in slots]
        self._current = current
        self._slots = tuple(slots)
        self._num_lanes = 1 + max(lane for _, lane in slots)
        self._allocator = allocator
        self._books = gate.books
        self._gate = gate
        self._holdings = holdings

    def reserve(self, index: int, size_bytes: int) -> None:
        """Make the slot at least this large; HoldfastError if it is not and the lock is on."""
        with self._gate.changing:
            if self._books.size_bytes[index] < size_bytes:
                self._fill(index, size_bytes)
            self._books.reserved(index, size_bytes)

    def level(self) -> None:
        """Make the ubatches of each lane alike, unless the lock is on."""
        with self._gate.changing:
            for index in range(len(self._slots)):
                size_bytes = self._levelled_bytes(index)
                if self._books.size_bytes[index] < size_bytes:
                    self._replace(index, size_bytes, is_touched=True)

    def new_views(self, index: int, specs: tuple[Spec, ...]) -> list[torch.Tensor]:
        """Views into the slot, one per spec, that do not overlap; they are remembered."""
        ends = [*accumulate((spec_bytes((spec,)) for spec in specs), initial=0)]
        self._books.asked(index, ends[-1], asking_frame())
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
        specs: tuple[Spec, ...],
        views: tuple[torch.Tensor, ...],
    ) -> None:
        """Hand out `views` for `specs` from now on, as long as the slot has this buffer."""
        # In this order: a slot changes its buffer first and its memo second, so that views of a
        # buffer that another thread replaces meanwhile end in no memo, or in one that is dropped.
        memo = self.memos[index]
        if self._current[index] is not buffer:
            return
        if len(memo) >= MEMO_ENTRIES:
            memo.clear()
        with contextlib.suppress(TypeError):  # a shape that is a list
            memo[specs] = views

    def buffer_of(self, index: int, required_bytes: int) -> torch.Tensor:
        """The buffer of the slot, grown to `required_bytes` if it must; may refuse that."""
        current = self._current[index]
        if current is not None and current.numel() >= required_bytes:
            return current
        del current  # else its memory could not serve the larger one
        if not required_bytes:  # nothing asked is no reason to grow, nor to refuse
            return torch.empty(0, dtype=torch.uint8, device=self._allocator.device)
        return self._grow(index, required_bytes, asking_frame())

    def _grow(self, index: int, required_bytes: int, caller: str) -> torch.Tensor:
        with self._gate.changing:
            self._books.asked(index, required_bytes, caller)
            current = self._current[index]
            if current is not None and current.numel() >= required_bytes:
                return current  # reserved meanwhile by another thread
            del current
            reason = self._gate.reason_against(required_bytes)
            if reason:
                self._refuse(index, required_bytes, caller, reason)
            held_bytes = self._books.size_bytes[index]
            buffer = self._grown(index, required_bytes, caller)
            self._note_growth(index, held_bytes, caller)
            self.level()
            return buffer

    def _grown(self, index: int, required_bytes: int, caller: str) -> torch.Tensor:
        # At once what levelling would make of it, which would else retire a buffer just made.
        grown_bytes = self._gate.size_bytes(required_bytes)
        levelled_bytes = self._levelled_bytes(index)
        size_bytes = max(grown_bytes, levelled_bytes)
        try:
            return self._replace(index, size_bytes, is_touched=levelled_bytes > grown_bytes)
        except RuntimeError as error:  # the allocator's, torch.OutOfMemoryError among them
            if self._books.phase == "warmup":
                raise
            self._refuse(index, required_bytes, caller, f"out of memory: {error}")

    def _levelled_bytes(self, index: int) -> int:
        """The least size of a slot beside the ubatches of its lane; 0 where it is on its own."""
        if self._books.is_locked or not self.is_levelled:
            return 0
        return max(self._books.size_bytes[index % self._num_lanes :: self._num_lanes])

    def _fill(self, index: int, size_bytes: int) -> None:
        if self._books.is_locked:
            raise HoldfastError(
                f"Workspace {self._slots[index]} holds {self._books.size_bytes[index]} bytes and "
                f"is locked: it is too late to reserve {size_bytes} bytes.",
                remedy="reserve it in the constructor or the warm-up of the model.",
            )
        is_growth = self._current[index] is not None
        self._replace(index, size_bytes, is_touched=True)
        if is_growth:
            self._books.grew(self._books.phase)

    def _replace(self, index: int, size_bytes: int, *, is_touched: bool) -> torch.Tensor:
        """Put a buffer of `size_bytes` into the slot; on an error a kept old one stays there.

        Before the seal and the lock the old one is freed first, as in vLLM, for the lower peak.
        """
        if self._books.phase == "warmup":
            self._install(index, None)
            self._allocator.give_back()
        buffer = self._allocator.buffer(size_bytes, is_touched=is_touched)
        old = self._current[index]
        self._install(index, buffer)
        self._holdings.retire(() if old is None else (old,))
        return buffer

    def _install(self, index: int, buffer: torch.Tensor | None) -> None:
        self._current[index] = buffer
        self.memos[index] = {}
        self._books.resized(index, 0 if buffer is None else buffer.numel())

    def _note_growth(self, index: int, held_bytes: int, caller: str) -> None:
        phase = self._books.phase
        self._books.grew(phase)
        logger.log(
            logging.INFO if phase == "warmup" else logging.WARNING,
            "Workspace %s grew for '%s' (%s): %.2f MB -> %.2f MB",
            self._slots[index],
            caller,
            phase,
            held_bytes / MIB,
            self._books.size_bytes[index] / MIB,
        )

    def _refuse(self, index: int, required_bytes: int, caller: str, reason: str) -> NoReturn:
        held_bytes = self._books.size_bytes[index]
        rejection = Rejection("scratch", caller, required_bytes, held_bytes, reason)
        self._gate.refuse(rejection, scratch_message(rejection, self._books.phase))
