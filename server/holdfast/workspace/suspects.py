"""Which requests were in the step that ended an engine: written by the worker, read by anyone.

A front end that replays requests in the next generation has to know which of them not to trust.
A process that crashes in native code says nothing any more, so each rank keeps the requests of its
running step, and of the one before it, in a file that it has mapped. The step before counts too:
with asynchronous scheduling a kernel of it may still have run. Knows neither vLLM nor torch.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from holdfast.files import ending_with
from holdfast.records import Suspect
from holdfast.workspace.mapped import new_mapping

REQUEST_BYTES = 256
"""Room for the name of a request and its numbers; the front end sends no longer name."""
NOT_RUNNING, RUNNING = 0, 1

_SUFFIX = ".step"
_HEADER = struct.Struct("=qqq")
"""Whether a step runs, how many were written, and the bytes of each of the two copies."""
_COPY = struct.Struct("=qq")
"""The number of the step, which is written last, and the bytes of its requests."""
_UNKNOWN = _COPY.pack(0, 0)
_NUMBER = "q"
_SEPARATOR = "\n"


class StepRequests:
    """Keeps the requests of the last two steps of one rank; its worker alone writes."""

    def __init__(
        self,
        directory: Path,
        *,
        engine: int,
        rank: int,
        most_requests: int,
        shared: Path | None = None,
    ) -> None:
        """Make the file; `shared` says where in memory, see `mapped`.

        Raises:
            OSError: there is no room for it.
        """
        self._copy_bytes = _COPY.size + REQUEST_BYTES * max(1, most_requests)
        size_bytes = _HEADER.size + 2 * self._copy_bytes
        path = directory / f"engine-{engine}-rank-{rank}{_SUFFIX}"
        self._count = 0
        with new_mapping(path, size_bytes, shared) as self._map:
            self._show(NOT_RUNNING)

    def began(self, scheduler_output: Any) -> None:
        """A step begins, with what vLLM's `SchedulerOutput` says (0.32, 0.33).

        Raises:
            AttributeError, LookupError, TypeError, ValueError: vLLM says it in another way; nothing
                is known of this step.
        """
        self._count += 1
        start = _HEADER.size + self._count % 2 * self._copy_bytes
        # First: of a step whose requests cannot be written nothing is to be believed.
        self._map[start : start + _COPY.size] = _UNKNOWN
        self._show(RUNNING)
        content = _packed(scheduler_output)
        if _COPY.size + len(content) > self._copy_bytes:
            raise ValueError(f"the names of the requests of a step take {len(content)} bytes")
        begin = start + _COPY.size
        self._map[begin : begin + len(content)] = content
        # No checksum: it is read when the process is dead, or has been in this step for minutes.
        self._map[start : start + _COPY.size] = _COPY.pack(self._count, len(content))

    def ended(self) -> None:
        """No step runs: what the process dies of now is not the doing of the last one."""
        self._show(NOT_RUNNING)

    def _show(self, state: int) -> None:
        self._map[: _HEADER.size] = _HEADER.pack(state, self._count, self._copy_bytes)


def read_suspects(directory: Path) -> Mapping[int, tuple[Suspect, ...]]:
    """The requests of the running and the last step of each engine in which a rank runs one.

    An engine is left out where no step runs, or where a rank does not know what it runs.
    """
    found: dict[int, dict[str, Suspect]] = {}
    unknown: set[int] = set()
    for path in ending_with(_SUFFIX, directory):
        try:
            engine = int(path.name.split("-")[1])
            suspects = _running(path.read_bytes())
        except (OSError, ValueError, IndexError, struct.error):
            continue
        if suspects is None:
            unknown.add(engine)
            continue
        known = found.setdefault(engine, {})
        for suspect in suspects:
            known.setdefault(suspect.request_id, suspect)
    return MappingProxyType(
        {
            engine: tuple(suspects.values())
            for engine, suspects in found.items()
            if suspects and engine not in unknown
        }
    )


def _packed(scheduler_output: Any) -> bytes:
    """Every request of a step: how many are new, for each what it had computed, had made and gets.

    Called at every step of every rank: no object is made for a single request.
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


def _running(content: bytes) -> tuple[Suspect, ...] | None:
    """What is in a file: nothing where no step runs, None where the one that runs is unknown."""
    state, count, copy_bytes = _HEADER.unpack_from(content)
    if state != RUNNING:
        return ()
    current = _copy(content, count, copy_bytes)
    before = _copy(content, count - 1, copy_bytes) or ()
    if current is None:
        return None
    return (*current, *(replace(suspect, is_in_last_step=False) for suspect in before))


def _copy(content: bytes, number: int, copy_bytes: int) -> tuple[Suspect, ...] | None:
    """One step; None if it is not there, or not whole."""
    start = _HEADER.size + number % 2 * copy_bytes
    found, size_bytes = _COPY.unpack_from(content, start)
    requests = content[start + _COPY.size : start + _COPY.size + size_bytes]
    if number < 1 or found != number or len(requests) != size_bytes:
        return None
    return tuple(_unpacked(requests))


def _unpacked(content: bytes) -> Iterable[Suspect]:
    numbers = array(_NUMBER)
    (count,) = struct.unpack_from(f"={_NUMBER}", content)
    end = numbers.itemsize * (1 + 3 * count)
    numbers.frombytes(content[numbers.itemsize : end])
    names = content[end:].decode().split(_SEPARATOR) if count else []
    computed, made = numbers[:count], numbers[count : 2 * count]
    scheduled = numbers[2 * count :]
    for name, before, output, tokens in zip(names, computed, made, scheduled, strict=True):
        yield Suspect(name, before + tokens, is_prefill=output == 0)
