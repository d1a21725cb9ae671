"""Records which requests were in the steps that ended an engine.

A front end that replays requests in the next generation must know which of them not to trust.
A process that crashes in native code cannot report anything, so each rank keeps the requests of its
last steps, as many as vLLM has in flight at once, in a file that it has mapped. Those that have
ended count too: with asynchronous scheduling a kernel of one may still have run. Knows neither
vLLM nor torch.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

from holdfast.atomic_files import files_with_suffix
from holdfast.records import Suspect
from holdfast.workspace.stats.mapped_files import new_mapping

REQUEST_BYTES = 256
"""Room for a request's name and its numbers; the front end never sends a longer name."""
MIN_STEPS = 2
"""The previous step is kept even if an engine runs one step at a time."""

_SUFFIX = ".step"
_HEADER = struct.Struct("=qqqq")
"""How many steps have ended, have begun and are kept, and the bytes of each."""
_ENDED, _BEGUN = 0, 1
_COPY = struct.Struct("=qq")
"""The number of the step, which is written last, and the bytes of its requests."""
_UNKNOWN = 0
_NUMBER: Final = "q"
_NUMBER_BYTES = 8
_SEPARATOR = "\n"


class StepRequests:
    """Keeps the requests of the last steps of one rank; its worker alone writes."""

    def __init__(  # noqa: PLR0913 - what the file is named after, and what it has room for
        self,
        directory: Path,
        *,
        engine: int,
        rank: int,
        max_requests: int,
        max_steps: int,
        shared: Path | None = None,
    ) -> None:
        """Make the file, for as many steps as are in flight at once.

        `shared` says where in memory, see `stats.mapped_files`.

        Raises:
            OSError: there is not enough room for it.
        """
        self.begun = 0
        """The number of the step that began last."""
        self._steps = max(MIN_STEPS, max_steps)
        self._room_bytes = REQUEST_BYTES * max(1, max_requests)
        self._copy_numbers = (_COPY.size + self._room_bytes) // _NUMBER_BYTES
        copy_bytes = self._copy_numbers * _NUMBER_BYTES
        path = directory / f"engine-{engine}-rank-{rank}{_SUFFIX}"
        size_bytes = _HEADER.size + self._steps * copy_bytes
        with new_mapping(path, size_bytes, shared) as self._map:
            self._numbers = memoryview(self._map).cast(_NUMBER)
            self._map[: _HEADER.size] = _HEADER.pack(0, 0, self._steps, copy_bytes)

    def began(self, scheduler_output: Any) -> None:
        """Record that a step begins, from vLLM's `SchedulerOutput` (0.32, 0.33).

        Raises:
            AttributeError, LookupError, TypeError, ValueError: its form has changed; nothing is
                known of this step.
        """
        self.begun = number = self.begun + 1
        numbers = self._numbers
        copy = _HEADER.size // _NUMBER_BYTES + number % self._steps * self._copy_numbers
        # Set first: if its requests cannot be written, nothing about the step may be believed.
        numbers[copy] = _UNKNOWN
        numbers[_BEGUN] = number
        content = _packed(scheduler_output)
        size_bytes = len(content)
        if size_bytes > self._room_bytes:
            raise ValueError(f"the names of the requests of a step take {size_bytes} bytes")
        begin = copy * _NUMBER_BYTES + _COPY.size
        self._map[begin : begin + size_bytes] = content
        # No checksum: readers come when the process is dead, or has been in this step for minutes.
        numbers[copy + 1] = size_bytes
        numbers[copy] = number

    def ended(self, number: int) -> None:
        """Record that this step and all before it have ended: they cause nothing from now on."""
        self._numbers[_ENDED] = number


def read_suspects(directory: Path) -> Mapping[int, tuple[Suspect, ...]]:
    """Read the requests of each engine's running and last steps.

    An engine is left out if no step runs, or if a rank does not know what it runs.
    """
    ranks: dict[int, list[_RankSteps]] = {}
    for path in files_with_suffix(_SUFFIX, directory):
        try:
            engine = int(path.name.split("-")[1])
            rank = _RankSteps.of(path.read_bytes())
        except (OSError, ValueError, IndexError, struct.error):
            continue
        ranks.setdefault(engine, []).append(rank)
    found = {engine: _suspects(its_ranks) for engine, its_ranks in ranks.items()}
    return MappingProxyType({engine: suspects for engine, suspects in found.items() if suspects})


def read_reached_tokens(directory: Path) -> Mapping[str, int]:
    """Read the tokens of prompt and answer that the requests of each engine's last step have.

    They are by vLLM's internal ID, and include those of the step itself once it has ended. All
    ranks of an engine run the same steps, so one of them is read. What cannot be read is left out.
    """
    found: dict[int, Mapping[str, int]] = {}
    for path in sorted(files_with_suffix(_SUFFIX, directory)):
        try:
            engine = int(path.name.split("-")[1])
            if engine not in found:
                found[engine] = _newest(path.read_bytes())
        except (OSError, ValueError, IndexError, struct.error):
            continue
    return MappingProxyType(dict(chain.from_iterable(one.items() for one in found.values())))


def _newest(content: bytes) -> Mapping[str, int]:
    """Return the tokens of the newest step that is completely written; none if there is none."""
    ended, begun, steps, copy_bytes = _HEADER.unpack_from(content)
    for number in range(begun, max(0, begun - steps), -1):
        copy = _copy(content, number, number % steps * copy_bytes)
        if copy is not None:
            is_over = number <= ended
            return {
                one.request_id: one.reached_tokens if is_over else one.computed_tokens
                for one in copy
            }
    return {}


def _packed(scheduler_output: Any) -> bytes:
    """Pack a step's requests: how many are new; tokens each had computed, had made and gets.

    This runs at every step of every rank, so it makes no object for a single request.
    """
    new, cached = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
    names = [one.req_id for one in new] + cached.req_ids
    scheduled = scheduler_output.num_scheduled_tokens
    numbers = array(
        _NUMBER,
        [
            len(names),
            *[one.num_computed_tokens for one in new],
            *cached.num_computed_tokens,
            *[0] * len(new),
            *cached.num_output_tokens,
            *[scheduled[name] for name in names],
        ],
    )
    return numbers.tobytes() + _SEPARATOR.join(names).encode()


@dataclass(frozen=True, slots=True)
class _Scheduled:
    """A request of a step, and what it had when the step began."""

    request_id: str
    computed_tokens: int
    made_tokens: int
    """The tokens of the answer so far."""
    scheduled_tokens: int

    @property
    def reached_tokens(self) -> int:
        """Its context at the end of the step."""
        return self.computed_tokens + self.scheduled_tokens


@dataclass(frozen=True, slots=True)
class _RankSteps:
    """The contents of one rank's file."""

    ended: int
    begun: int
    kept: Mapping[int, tuple[_Scheduled, ...] | None]
    """The requests of its last steps, by number; None for a missing or incomplete step."""

    @classmethod
    def of(cls, content: bytes) -> Self:
        ended, begun, steps, copy_bytes = _HEADER.unpack_from(content)
        numbers = range(max(1, begun - steps + 1), begun + 1)
        return cls(ended, begun, {n: _copy(content, n, n % steps * copy_bytes) for n in numbers})


def _suspects(ranks: Sequence[_RankSteps]) -> tuple[Suspect, ...]:
    """Return one engine's requests, those of its last step first; none if no step runs.

    There are also none if a rank does not know what runs. All ranks run the same steps, the first
    stages of a pipeline ahead of the others: they know only of launches, so a step has ended when
    it has for every rank.
    """
    ended = min(rank.ended for rank in ranks)
    if max(rank.begun for rank in ranks) == ended:
        return ()
    named: dict[str, Suspect] = {}
    for number in sorted({number for rank in ranks for number in rank.kept}, reverse=True):
        known = [rank.kept[number] for rank in ranks if number in rank.kept]
        is_running = number > ended
        if is_running and None in known:
            return ()
        for one in chain.from_iterable(filter(None, known)):
            suspect = Suspect(
                one.request_id,
                one.reached_tokens,
                is_prefill=one.made_tokens == 0,
                is_in_running_step=is_running,
            )
            named.setdefault(one.request_id, suspect)
    return tuple(named.values())


def _copy(content: bytes, number: int, offset_bytes: int) -> tuple[_Scheduled, ...] | None:
    """Read one step; None if it is missing or incomplete."""
    start = _HEADER.size + offset_bytes
    found, size_bytes = _COPY.unpack_from(content, start)
    requests = content[start + _COPY.size : start + _COPY.size + size_bytes]
    if found != number or len(requests) != size_bytes:
        return None
    return tuple(_unpacked(requests))


def _unpacked(content: bytes) -> Iterable[_Scheduled]:
    numbers = array(_NUMBER)
    (count,) = struct.unpack_from(f"={_NUMBER}", content)
    end = numbers.itemsize * (1 + 3 * count)
    numbers.frombytes(content[numbers.itemsize : end])
    names = content[end:].decode().split(_SEPARATOR) if count else []
    computed, made = numbers[:count], numbers[count : 2 * count]
    scheduled = numbers[2 * count :]
    yield from map(_Scheduled, names, computed, made, scheduled)
