"""Bounds the memory that the grammars of requests take in an EngineCore, and gives it back.

xgrammar keeps every state that an answer may be in: after a literal, 6,000 rules that all match add
280 MiB with one token, in less CPU time than a grammar has (0.2.8). A grammar that grows by more
than `most_grammar_bytes` ends with its request. When all of them take more than a few times that,
the largest ones end first, so that usual schemas, which take a few KiB, never notice.

The allocator keeps what a grammar leaves behind, up to hundreds of MiB, so it is told to return it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import threading
import weakref
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Any, Protocol

NO_ROOM = "holdfast: the grammars of all requests exceeded their memory"

GRAMMARS_AT_ONCE = 4
"""How many grammars of the largest size an engine holds at the same time."""
LARGE_BYTES = 16 << 20
"""What was freed is given back from here on: that takes milliseconds."""
_NOTICED_BYTES = 1 << 20
_BASE_BYTES = 64 << 20
_BYTES_PER_TOKEN = 5 << 10
"""A mask has a bit for each token: those of 30 strings of bounded length take 480 MiB with a
vocabulary of 200,000, and 60 MiB with one of 32,000 (xgrammar 0.2.8)."""
_TIMES_THE_TEXT = 300
"""What a text is made into takes up to 180 times as much in llguidance (1.7). xgrammar does not
count all that it makes: 270 times the text of a choice among 24,000, and a quarter of its masks."""
_PAGE_BYTES = resource.getpagesize()
_STATM_BYTES = 256
_HUGE_PAGE_BYTES = 2 << 20


def _has_huge_pages() -> bool:
    """Whether a first touch may add more than a page; then the process tells how much it was."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return not setting.exists() or "[always]" in setting.read_text(encoding="utf-8")


_HAS_HUGE_PAGES = _has_huge_pages()


def most_grammar_bytes(vocabulary_tokens: int) -> int:
    """Return how much memory one grammar may take: 224 MiB for 32,000 tokens, 1 GiB for 200,000."""
    return _BASE_BYTES + _BYTES_PER_TOKEN * vocabulary_tokens


def compiled_bytes(grammar: Any, text: str) -> int:
    """Return the most memory that a grammar of vLLM takes, as compiled from this text.

    Of one that is cached, this is the same as when it was compiled.
    """
    text_bytes = _TIMES_THE_TEXT * len(text)
    compiled = getattr(grammar, "ctx", None)
    if compiled is None:
        return text_bytes
    counted_bytes = int(compiled.memory_size_bytes)
    return counted_bytes + min(2 * counted_bytes, counted_bytes // 4 + text_bytes)


def give_back() -> None:
    """Have the allocator return free memory to the kernel."""
    ctypes.CDLL(None).malloc_trim(0)


def private_bytes() -> int:
    """Return the resident memory of this process, without shared memory and mapped files."""
    # With huge pages once for each step, where psutil would take 30 us, and Path 10 us.
    statm = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        _, resident, shared, *_ = map(int, os.read(statm, _STATM_BYTES).split())
    finally:
        os.close(statm)
    return (resident - shared) * _PAGE_BYTES


class ThreadGrowth:
    """Measures how much memory a thread touches first, whatever other threads do meanwhile.

    That is what it adds to the process, except for what it frees again. A usual grammar touches a
    few pages in thousands of tokens, with xgrammar and with llguidance.
    """

    def __init__(self) -> None:
        self._faults = 0
        self._private_bytes = 0

    def begin(self) -> None:
        """Measure from now on."""
        self._faults = _faults()
        if _HAS_HUGE_PAGES:
            self._private_bytes = private_bytes()

    def grown_bytes(self) -> int:
        """Return what was added since the last call; the calling thread is always the same."""
        faults, before_bytes = self._faults, self._private_bytes
        self._faults = _faults()
        if not _HAS_HUGE_PAGES or faults == self._faults:
            return (self._faults - faults) * _PAGE_BYTES
        self._private_bytes = private_bytes()
        touched_bytes = (self._faults - faults) * _HUGE_PAGE_BYTES
        return max(0, min(self._private_bytes - before_bytes, touched_bytes))


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


class HeldGrammar(Protocol):
    """A grammar as `GrammarMemory` sees it."""

    compiled_bytes: int

    @property
    def compiled_as(self) -> Hashable:
        """Equal for those that share what was compiled."""

    @property
    def grown_bytes(self) -> int:
        """How much its answer has added."""

    def drop(self, reason: str) -> None:
        """Give it up, and free it."""


class GrammarMemory:
    """The grammars that one EngineCore holds. Any thread may call this."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._added_bytes = 0
        self._before_bytes = 0

    def hold(self, grammar: HeldGrammar) -> None:
        """Count a grammar until it is freed, and make room for it."""
        with self._lock:
            self._held.add(grammar)
            self._make_room()

    def grew(self, added_bytes: int) -> None:
        """Make room for what the grammars of a step have added."""
        self._added_bytes += added_bytes
        if self._added_bytes > _NOTICED_BYTES:
            self._added_bytes = 0
            with self._lock:
                self._make_room()

    def _make_room(self) -> None:
        """Drop the largest until all take no more than they may; give back what was freed."""
        held = sorted(self._held, key=_size_bytes)
        sharing = Counter(one.compiled_as for one in held)
        compiled = {one.compiled_as: one.compiled_bytes for one in held}
        total_bytes = sum(compiled.values()) + sum(one.grown_bytes for one in held)
        while total_bytes > self._most_bytes:
            largest = held.pop()
            sharing[largest.compiled_as] -= 1
            is_last = not sharing[largest.compiled_as]
            total_bytes -= largest.grown_bytes + (largest.compiled_bytes if is_last else 0)
            self._held.discard(largest)
            largest.drop(NO_ROOM)
        freed_bytes, self._before_bytes = self._before_bytes - total_bytes, total_bytes
        if freed_bytes > LARGE_BYTES:
            give_back()


def _size_bytes(grammar: HeldGrammar) -> int:
    return grammar.compiled_bytes + grammar.grown_bytes
