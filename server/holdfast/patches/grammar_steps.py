"""Advances the grammars of one engine step in threads, and gives up those that take too much.

The scheduling loop waits for the threads while each grammar has CPU time left. Native code cannot
be interrupted, so the thread of a grammar that was given up goes on, at the lowest priority, until
the native call returns. xgrammar, llguidance and outlines release Python's lock meanwhile.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from holdfast.patches.grammar_memory import ThreadGrowth, give_back, most_grammar_bytes

TOO_SLOW = "holdfast: the grammar exceeded its CPU time"
TOO_LARGE = "holdfast: the grammar exceeded its memory"
HAD_NO_TIME = "holdfast: other work left the grammar no time"
FAILED = "holdfast: the grammar failed"

BURST_SECONDS = 0.25
"""CPU time that a grammar may take for one token, if it has saved it."""
SECONDS_PER_TOKEN = 0.01
"""CPU time that a grammar may take for each token on average; usual schemas take a hundredth."""
STEP_SECONDS = 0.5
"""CPU time of all grammars in a step after which none may take what it has saved."""
MAX_WAIT_SECONDS = 30.0
"""How long a step waits for a grammar that gets no CPU time."""
_POLL_SECONDS = 0.01
_UNNOTICED_SECONDS = 0.001
"""Up to here, the time on the wall counts as CPU time: the clock of a thread costs more."""
_SHARED_ABOVE = 128
"""With more grammars than this, several threads share a step, as in vLLM (0.32)."""
_LOWEST_PRIORITY = 19

logger = logging.getLogger("vllm.holdfast")


@dataclass(slots=True)
class GrammarBudget:
    """The CPU time that one grammar may take, and the memory that its answer may add to it."""

    saved_seconds: float = BURST_SECONDS
    most_bytes: int = most_grammar_bytes(0)
    grown_bytes: int = 0

    def excess(self, seconds: float, tokens: int, others_seconds: float = 0.0) -> str:
        """Return why it may not take so long for the tokens of a step; empty if it may.

        What the others of the step have taken may leave it only the share of its tokens. That is
        not its own fault.
        """
        if seconds > self._allowed_seconds(seconds, tokens):
            return TOO_SLOW
        if seconds > self._allowed_seconds(others_seconds + seconds, tokens):
            return HAD_NO_TIME
        return ""

    def _allowed_seconds(self, step_seconds: float, tokens: int) -> float:
        is_late = step_seconds > STEP_SECONDS
        return tokens * SECONDS_PER_TOKEN + (0.0 if is_late else self.saved_seconds)

    def spend(self, seconds: float, tokens: int, others_seconds: float = 0.0) -> str:
        """Charge what it took for the tokens; return why it may not, as `excess` does."""
        reason = self.excess(seconds, tokens, others_seconds)
        saved_seconds = self.saved_seconds + tokens * SECONDS_PER_TOKEN - seconds
        self.saved_seconds = min(BURST_SECONDS, saved_seconds)
        return reason

    def grow(self, added_bytes: int) -> bool:
        """Charge what was added to it; return whether that was allowed."""
        self.grown_bytes += added_bytes
        return self.grown_bytes <= self.most_bytes


@dataclass(slots=True, eq=False)
class Job:
    """What one grammar has to do in a step."""

    work: Callable[[], Any]
    """Runs in a thread."""
    finish: Callable[[Any], None]
    """Takes what `work` returned, while the scheduling loop waits."""
    give_up: Callable[[str], None]
    """Called instead of `finish`, with the reason."""
    budget: GrammarBudget
    tokens: int = 1


@dataclass(slots=True, eq=False)
class _Step:
    jobs: deque[Job]
    used_seconds: float = 0.0
    grown_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: queue.SimpleQueue[_Worker] = field(default_factory=queue.SimpleQueue)


class _Worker(threading.Thread):
    """A thread that takes jobs of a step until none is left."""

    def __init__(self) -> None:
        super().__init__(name="holdfast-grammars", daemon=True)
        self.steps: queue.SimpleQueue[_Step] = queue.SimpleQueue()
        self._job: Job | None = None
        self._began_seconds = 0.0
        self._read_at_seconds = self._cpu_seconds = 0.0
        """When the thread's clock was read last, and what it showed."""
        self._growth = ThreadGrowth()
        self._is_lost = False
        self.start()

    def run(self) -> None:
        while not self._is_lost:
            step = self.steps.get()
            self._read_clock(time.monotonic())
            self._growth.begin()
            result = error = None
            while (job := self._next(step, result, error)) is not None:
                result, error = _outcome(job)
            if not self._is_lost:
                step.ended.put(self)
        give_back()

    def _next(self, step: _Step, result: Any, error: Exception | None) -> Job | None:
        """End the job that is done, and return the next one; None if there is none."""
        now_seconds = time.monotonic()
        with step.lock:
            if self._is_lost:
                return None
            if self._job is not None:
                self._end(self._job, step, now_seconds, result, error)
            self._job = step.jobs.popleft() if step.jobs else None
            self._began_seconds = now_seconds
            return self._job

    def _end(
        self, job: Job, step: _Step, now_seconds: float, result: Any, error: Exception | None
    ) -> None:
        seconds = now_seconds - self._began_seconds
        if now_seconds - self._read_at_seconds > _UNNOTICED_SECONDS:
            seconds = min(seconds, self._read_clock(now_seconds))
        others_seconds = step.used_seconds
        step.used_seconds += seconds
        grown_bytes = self._growth.grown_bytes()
        step.grown_bytes += grown_bytes
        if error is not None:
            logger.error("A grammar failed, and its request with it", exc_info=error)
            job.give_up(FAILED)
        elif not job.budget.grow(grown_bytes):
            job.give_up(TOO_LARGE)
            give_back()
            self._growth.begin()
        elif reason := job.budget.spend(seconds, job.tokens, others_seconds):
            job.give_up(reason)
        else:
            job.finish(result)

    def _read_clock(self, now_seconds: float) -> float:
        """Return the CPU time since the last call."""
        before_seconds, self._cpu_seconds = self._cpu_seconds, time.thread_time()
        self._read_at_seconds = now_seconds
        return self._cpu_seconds - before_seconds

    def gives_up(self, step: _Step) -> bool:
        """Give up a job that takes too long; return whether this thread is lost with it."""
        with step.lock:
            job = self._job
            if job is None or self.ident is None:
                return False
            clock = time.pthread_getcpuclockid(self.ident)
            waited_seconds = time.monotonic() - self._began_seconds
            seconds = min(waited_seconds, time.clock_gettime(clock) - self._cpu_seconds)
            reason = job.budget.excess(seconds, job.tokens, step.used_seconds)
            if not reason and waited_seconds <= MAX_WAIT_SECONDS:
                return False
            step.used_seconds += seconds
            self._is_lost = True
            job.give_up(reason or HAD_NO_TIME)
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.native_id or 0, _LOWEST_PRIORITY)
        return True


def _outcome(job: Job) -> tuple[Any, Exception | None]:
    try:
        return job.work(), None
    except Exception as error:  # noqa: BLE001 - native code of four libraries; it is one request's
        return None, error


class GrammarThreads:
    """The threads of one EngineCore. Only its scheduling loop may call this."""

    def __init__(self) -> None:
        self._sharing = max(1, min((os.cpu_count() or 1) // 2, 8))
        self._idle: list[_Worker] = []

    def run(self, jobs: Iterable[Job]) -> int:
        """Return when each job is done or given up, with the memory that they have added."""
        step = _Step(deque(jobs))
        threads = self._sharing if len(step.jobs) > _SHARED_ABOVE else 1
        running = {self._start(step) for _ in range(threads)}
        while running:
            try:
                worker = step.ended.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                lost = {one for one in running if one.gives_up(step)}
                running = (running - lost) | {self._start(step) for _ in lost}
            else:
                running.remove(worker)
                self._idle.append(worker)
        return step.grown_bytes

    def _start(self, step: _Step) -> _Worker:
        worker = self._idle.pop() if self._idle else _Worker()
        worker.steps.put(step)
        return worker
