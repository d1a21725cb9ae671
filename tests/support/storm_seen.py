"""What was seen in a storm (`storm.py`), in relation to what has to hold.

What has to hold of an honest answer:

* It is whole and equals, text for text, what the same server said undisturbed. Only a stream that
  had begun when its engine died may end with an error, after a beginning that is right.
* It is at most so many times as late as alone. *Alone* is the slowest answer to the same question
  while the same clients ask the same server and nobody attacks. *Late* is counted from the first
  try to the last byte, refusals with `Retry-After` and the waits that they ask for included: the
  client is OpenAI's own, which retries what it is told to. Not counted is the time in which no
  engine was there to answer: from the last READY that anybody saw to the next one, from the
  beginning of a stall where it was one, and while the test itself had stopped the engine. So an
  answer that a death interrupts may take the recovery and that many times itself, not more.

Memory is the sum of what all processes of the server hold for themselves (`Pss`, in which what they
share counts once), as a limit of a container counts it, in relation to that sum at READY.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from load import Answer, Load, Question
from servers import Server, descendants
from watch import Outage, Watch

MIB = 1024 * 1024
NUMBER = re.compile(r":\[\d+\]$")
"""By which Linux tells sockets and pipes apart."""
STREAM_BROKEN = "APIError: The engine died while it worked on this request."


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is asked of a server in a storm."""

    times_as_late: float
    livez_seconds: float
    times_the_memory: float


@dataclass
class Attacks:
    """What the adversary did, by the name of the attack."""

    counts: Counter[str] = field(default_factory=Counter)
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    spans: list[tuple[float, float, str]] = field(default_factory=list)
    """When each began and ended, of `time.monotonic()`."""

    def read(self, line: str) -> None:
        """Take one line of the adversary."""
        said = json.loads(line)
        self.counts[said["name"]] += 1
        self.spans.append((said["started"], said["started"] + said["seconds"], said["name"]))
        self.outcomes.setdefault(said["name"], Counter()).update(said["outcomes"])

    def beside(self, start: float, end: float) -> str:
        """The attacks that ran at some moment of a time, for people."""
        names = {name for began, ended, name in self.spans if began < end and start < ended}
        return ", ".join(sorted(names)) or "none"


@dataclass
class Memory:
    """What the processes of a server hold, by their names."""

    at_ready: Mapping[str, int]
    peak_bytes: int = 0
    at_peak: Mapping[str, int] = field(default_factory=dict)

    def note(self, held: Mapping[str, int]) -> None:
        """Take one look."""
        if sum(held.values()) > self.peak_bytes:
            self.peak_bytes, self.at_peak = sum(held.values()), held

    @property
    def at_ready_bytes(self) -> int:
        """The sum at READY."""
        return sum(self.at_ready.values())

    def told(self) -> str:
        """What each held at READY and at the peak, in MiB."""
        rows = [
            (name, self.at_ready.get(name, 0) / MIB, self.at_peak.get(name, 0) / MIB)
            for name in sorted({*self.at_ready, *self.at_peak})
        ]
        return ", ".join(f"{name} {before:.0f} to {then:.0f}" for name, before, then in rows)

    @property
    def ratio(self) -> float:
        """The largest sum in relation to that at READY."""
        return self.peak_bytes / self.at_ready_bytes


@dataclass(frozen=True, slots=True)
class Belongings:
    """What a server has that a storm may leak."""

    processes: int
    descriptors: Counter[str]
    """By what they are open on."""

    @classmethod
    def of(cls, server: Server) -> Belongings:
        """What it has now."""
        pid, opened = server.process.pid, Counter[str]()
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                opened[NUMBER.sub("", str(descriptor.readlink()))] += 1
        return cls(len(descendants(pid)), opened)

    def is_within(self, other: Belongings) -> bool:
        """Whether nothing is more than it was."""
        return (
            self.processes <= other.processes
            and self.descriptors.total() <= other.descriptors.total()
        )


@dataclass
class Seen:
    """All that was seen in a storm, and what was left after it."""

    load: Load
    alone: Mapping[Question, float]
    """The slowest answer to each question while nobody attacked."""
    stall_seconds: float
    attacks: Attacks
    watch: Watch
    memory: Memory
    stopped: Sequence[Outage]
    """While the test itself had stopped the engine."""
    left: list[str] = field(default_factory=list)
    """What the server did not clean up."""

    def outages(self) -> list[Outage]:
        """Times in which no engine was there to answer."""
        return [*self.watch.outages(stall_seconds=self.stall_seconds), *self.stopped]

    def latest(self) -> list[tuple[float, Answer]]:
        """Whole answers with how many times as late as alone they were, the worst one first.

        Outages are left out.
        """
        outages = self.outages()

        def lateness(answer: Answer) -> float:
            start, end = answer.started_seconds, answer.ended_seconds
            out = sum(outage.overlap_seconds(start, end) for outage in outages)
            return (end - start - out) / self.alone[answer.question]

        whole = [answer for answer in self.load.answers if not answer.error]
        return sorted(((lateness(a), a) for a in whole), key=lambda one: -one[0])

    def broken_promises(self, bounds: Bounds) -> Iterator[str]:
        """What did not hold, in words; nothing where all did."""
        yield from (f"lost: {_named(a)}: {a.error}" for a in self.load.lost)
        yield from (f"wrong: {_named(a)}: {a.texts}" for a in self.load.wrong)
        strange = {a.error for a in self.load.broken} - {STREAM_BROKEN}
        yield from (f"a stream ended with: {error}" for error in strange)
        for ratio, answer in self.latest():
            if ratio > bounds.times_as_late:
                yield f"{ratio:.1f} times as late as alone: {_named(answer)}{self._near(answer)}"
        for look in self.watch.looks:
            if look.livez_seconds > bounds.livez_seconds or look.status != 200:
                yield f"/livez {look.status} {look.state} after {look.livez_seconds:.2f} s"
        if self.memory.ratio > bounds.times_the_memory:
            yield f"{self.memory.ratio:.2f} times the memory of READY"
        yield from self.left

    def _near(self, answer: Answer) -> str:
        """Beside which attacks an answer came, and where the outage is that is nearest to it."""
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
        """For people."""
        rows = [
            f"{name:24}{count:6}  {_told(self.attacks.outcomes[name])}"
            for name, count in sorted(self.attacks.counts.items())
        ]
        late = [ratio for ratio, _ in self.latest()] or [0.0]
        outages = ", ".join(map(_span, self.outages()))
        ready_mib = self.memory.at_ready_bytes / MIB
        return "\n".join(
            [
                f"{'attack':24} times  answers",
                *rows,
                f"honest answers          {self.load.summary()}",
                f"worst lateness          {late[0]:.1f} x alone, p99 {late[len(late) // 100]:.1f}",
                f"slowest /livez          {self.watch.slowest_livez_seconds:.2f} s",
                f"memory                  {self.memory.ratio:.2f} x {ready_mib:.0f} MiB of READY",
                f"of that, in MiB         {self.memory.told()}",
                f"outages                 {outages or 'none'}",
                f"deaths by cause         {_told(self.watch.deaths)}",
                f"refused by reason       {_told(self.watch.refusals)}",
            ]
        )


def _named(answer: Answer) -> str:
    question = answer.question
    seconds = answer.ended_seconds - answer.started_seconds
    return f"{question.kind} of {question.max_tokens} tokens after {seconds:.1f} s"


def _span(outage: Outage) -> str:
    return f"{outage.end_seconds - outage.start_seconds:.0f} s"


def _told(counts: Mapping[str, float]) -> str:
    told = [f"{what} {count:.0f}" for what, count in sorted(counts.items())]
    return ", ".join(told) or "none"
