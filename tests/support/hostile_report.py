"""What honest clients saw beside an adversary (`hostile_run.py`), and whether it is good enough.

For an honest answer:

* It is complete, and its text equals the answer of the same server without an adversary. Only a
  stream that had begun when its engine died may end with an error, after a correct beginning.
* It takes at most N times as long as without an adversary. The baseline is the slowest answer to
  the same question while the same clients use the same server. Time counts from the first attempt
  to the last byte, including refusals with `Retry-After` and the waits that they ask for: the
  client is OpenAI's own, which retries. Time without an engine is not counted: from the last READY
  that was seen to the next one, from the beginning of a stall, and while the test itself had
  stopped the engine. An answer that an engine's death interrupts may therefore take the recovery
  plus N times the baseline.

No outage takes longer than some starts of an engine, nor do all of them together: what is
subtracted has a bound of its own. So have the moments at which the whole machine stood still, which
another process tells by how late it is woken.

Memory is the `Pss` of all processes of the server, which counts shared pages once, as a container's
limit does. It is compared with the sum at READY.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from load_generator import Answer, Load, Question
from server_watch import Outage, Watch
from servers import Server, descendants, wait_until

MIB = 1024 * 1024
NUMBER = re.compile(r":\[\d+\]$")
"""The number by which Linux tells sockets and pipes apart."""
MET = frozenset({"422", "500", "left"})
"""What becomes of a request that ended an engine; a client may leave before it does."""
STREAM_BROKEN = "APIError: The engine died while it worked on this request."


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits that a server has to keep beside an adversary."""

    times_as_late: float
    livez_seconds: float
    times_the_memory: float
    starts_per_outage: float
    """How often the first start would have fitted into one outage."""
    starts_in_all: float
    """How often it would have fitted into all of them."""
    standstill_seconds: float = 5.0
    """How long the machine may have stood still; after more, nothing can be said of the server."""


@dataclass
class Attacks:
    """What the adversary did, by the name of the attack."""

    counts: Counter[str] = field(default_factory=Counter)
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    spans: list[tuple[float, float, str]] = field(default_factory=list)
    """When each began and ended, of `time.monotonic()`."""

    def read(self, line: str) -> None:
        """Count one attack, from a line that the adversary printed."""
        said = json.loads(line)
        self.counts[said["name"]] += 1
        self.spans.append((said["started"], said["started"] + said["seconds"], said["name"]))
        self.outcomes.setdefault(said["name"], Counter()).update(said["outcomes"])

    def beside(self, start: float, end: float) -> str:
        """Return the names of the attacks that ran between `start` and `end`."""
        names = {name for began, ended, name in self.spans if began < end and start < ended}
        return ", ".join(sorted(names)) or "none"


@dataclass
class Memory:
    """The memory of a server's processes, by process name."""

    at_ready: Mapping[str, int]
    peak_bytes: int = 0
    at_peak: Mapping[str, int] = field(default_factory=dict)

    def note(self, held: Mapping[str, int]) -> None:
        """Keep this sample if its sum is the largest so far."""
        if sum(held.values()) > self.peak_bytes:
            self.peak_bytes, self.at_peak = sum(held.values()), held

    @property
    def at_ready_bytes(self) -> int:
        """The sum at READY."""
        return sum(self.at_ready.values())

    def by_process(self) -> str:
        """Return what each process held at READY and at the peak, in MiB."""
        rows = [
            (name, self.at_ready.get(name, 0) / MIB, self.at_peak.get(name, 0) / MIB)
            for name in sorted({*self.at_ready, *self.at_peak})
        ]
        return ", ".join(f"{name} {before:.0f} to {then:.0f}" for name, before, then in rows)

    @property
    def ratio(self) -> float:
        """The largest sum, divided by the sum at READY."""
        return self.peak_bytes / self.at_ready_bytes


@dataclass(frozen=True, slots=True)
class ResourceCounts:
    """What a server has open, and may leak."""

    processes: Counter[str]
    """By name; a zombie has one, too."""
    descriptors: Counter[str]
    """Open file descriptors, by target."""

    @classmethod
    def of(cls, server: Server) -> ResourceCounts:
        """Count what the server has now.

        It is asked for a page first. So our own connection always counts, and garbage is collected,
        which a server at rest does not do: what a dead engine had open may be in cycles.
        """
        server.metrics()
        pid, opened = server.process.pid, Counter[str]()
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                opened[NUMBER.sub("", str(descriptor.readlink()))] += 1
        return cls(Counter(map(_name, descendants(pid))), opened)

    def grown_from(self, before: ResourceCounts) -> dict[str, int]:
        """Return how much more there is of each kind; empty if neither sum is above `before`."""
        more = Counter[str]()
        if self.processes.total() > before.processes.total():
            more += self.processes - before.processes
        if self.descriptors.total() > before.descriptors.total():
            more += self.descriptors - before.descriptors
        return dict(+more)


def require_released(server: Server, before: ResourceCounts, *, deadline_seconds: float) -> None:
    """Wait until the server has no more open than `before`."""

    def grown() -> dict[str, int]:
        return ResourceCounts.of(server).grown_from(before)

    wait_until(
        lambda: not grown(),
        deadline_seconds=deadline_seconds,
        what=lambda: f"left open: {grown()}",
    )


@dataclass
class HostileReport:
    """What was seen of a server beside an adversary, and what was left after its end."""

    load: Load
    alone: Mapping[Question, float]
    """The slowest answer to each question without an adversary, in seconds."""
    stall_seconds: float
    attacks: Attacks
    watch: Watch
    memory: Memory
    stopped: Sequence[Outage]
    """The times in which the test itself had stopped the engine."""
    start_seconds: float
    """How long the first start took."""
    killers: Sequence[str] = ()
    """The killers each of which has to meet an engine."""
    left: list[str] = field(default_factory=list)
    """What the server did not clean up."""

    def outages(self) -> list[Outage]:
        """Return the times in which no engine could answer."""
        known = [*self._watched_outages(), *self.stopped]
        return known + [still for still in self.watch.standstills() if not still.meets(known)]

    def latest(self) -> list[tuple[float, Answer]]:
        """Return complete answers by their time relative to the baseline, the slowest first.

        Outages are subtracted.
        """
        outages = self.outages()

        def lateness(answer: Answer) -> float:
            start, end = answer.started_seconds, answer.ended_seconds
            out = sum(outage.overlap_seconds(start, end) for outage in outages)
            return (end - start - out) / self.alone[answer.question]

        whole = [answer for answer in self.load.answers if not answer.error]
        return sorted(((lateness(a), a) for a in whole), key=lambda one: -one[0])

    def broken_promises(self, bounds: Bounds) -> Iterator[str]:
        """Yield a line for each promise that did not hold."""
        yield from (f"lost: {_named(a)}: {a.error}" for a in self.load.lost)
        yield from (f"wrong: {_named(a)}: {a.texts}" for a in self.load.wrong)
        strange = {a.error for a in self.load.broken} - {STREAM_BROKEN}
        yield from (f"a stream ended with: {error}" for error in strange)
        for ratio, answer in self.latest():
            if ratio > bounds.times_as_late:
                yield f"{ratio:.1f} times the baseline: {_named(answer)}{self._near(answer)}"
        for look in self.watch.looks:
            if look.livez_seconds > bounds.livez_seconds or look.status != 200:
                yield f"/livez {look.status} {look.state} after {look.livez_seconds:.2f} s"
        yield from self._long_outages(bounds)
        for name in self.killers:
            if not MET.intersection(self.attacks.outcomes.get(name, ())):
                yield f"{name} met no engine"
        if (still_seconds := self._standstill_seconds()) > bounds.standstill_seconds:
            yield f"the machine stood still for {still_seconds:.1f} s: run it again"
        if self.memory.ratio > bounds.times_the_memory:
            yield f"{self.memory.ratio:.2f} times the memory of READY"
        yield from self.left

    def _long_outages(self, bounds: Bounds) -> Iterator[str]:
        """Yield a line for each outage that is too long, and for all of them together.

        Answers may be as late as outages are long, so these have to be bounded themselves.
        """
        spans = [one.end_seconds - one.start_seconds for one in self._watched_outages()]
        longest = bounds.starts_per_outage * self.start_seconds + self.stall_seconds
        yield from (f"an outage of {span:.0f} s" for span in spans if span > longest)
        if sum(spans) > bounds.starts_in_all * self.start_seconds:
            yield f"outages of {sum(spans):.0f} s in all, a start took {self.start_seconds:.0f} s"

    def _standstill_seconds(self) -> float:
        return sum(one.end_seconds - one.start_seconds for one in self.watch.standstills())

    def _watched_outages(self) -> list[Outage]:
        answered = [answer.ended_seconds for answer in self.load.answers if not answer.error]
        return self.watch.outages(stall_seconds=self.stall_seconds, answered=answered)

    def _near(self, answer: Answer) -> str:
        """Return which attacks ran beside an answer, and when its nearest outage was."""
        start, end = answer.started_seconds, answer.ended_seconds
        attacks = f", beside {self.attacks.beside(start, end)}"
        outage = min(
            self.outages(),
            key=lambda one: max(one.start_seconds - end, start - one.end_seconds),
            default=None,
        )
        if outage is None:
            return attacks
        before, after = outage.start_seconds - start, end - outage.end_seconds
        return f"{attacks}, from {before:.1f} s before an outage to {after:.1f} s after it"

    def table(self) -> str:
        """Return the report as a table."""
        rows = [
            f"{name:24}{count:6}  {_joined(self.attacks.outcomes[name])}"
            for name, count in sorted(self.attacks.counts.items())
        ]
        late = [ratio for ratio, _ in self.latest()] or [0.0]
        p99 = late[len(late) // 100]
        outages = ", ".join(map(_span, self.outages()))
        ready_mib = self.memory.at_ready_bytes / MIB
        return "\n".join(
            [
                f"{'attack':24} times  answers",
                *rows,
                f"honest answers          {self.load.summary()}",
                f"slowest answers         {late[0]:.1f} x baseline, p99 {p99:.1f}",
                f"slowest /livez          {self.watch.slowest_livez_seconds:.2f} s",
                f"memory                  {self.memory.ratio:.2f} x {ready_mib:.0f} MiB of READY",
                f"of that, in MiB         {self.memory.by_process()}",
                f"first start             {self.start_seconds:.0f} s",
                f"outages                 {outages or 'none'}",
                f"machine stood still     {self._standstill_seconds():.1f} s",
                f"deaths by cause         {_joined(self.watch.deaths)}",
                f"refused by reason       {_joined(self.watch.refusals)}",
            ]
        )


def _name(process: psutil.Process) -> str:
    """What the kernel calls a process, and whether it has ended; empty if it is gone."""
    try:
        is_zombie = process.status() == psutil.STATUS_ZOMBIE
        return f"{'ended ' * is_zombie}{process.name()}"
    except psutil.NoSuchProcess:
        return ""


def _named(answer: Answer) -> str:
    question = answer.question
    seconds = answer.ended_seconds - answer.started_seconds
    return f"{question.kind} of {question.max_tokens} tokens after {seconds:.1f} s"


def _span(outage: Outage) -> str:
    return f"{outage.end_seconds - outage.start_seconds:.0f} s"


def _joined(counts: Mapping[str, float]) -> str:
    parts = [f"{what} {count:.0f}" for what, count in sorted(counts.items())]
    return ", ".join(parts) or "none"
