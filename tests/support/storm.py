"""An adversary with one API key storms a server beside eight honest clients with another one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import psutil

from faults import Patient, left_in_shared_memory
from holdfast.processes.tree import is_alive
from hostile.__main__ import Plan
from hostile.target import QUERY_MARK
from load import Answer, Question, loaded, questions, undisturbed
from servers import READY_DEADLINE_SECONDS, SMALL, Server, descendants, running, wait_until
from storm_seen import Attacks, Belongings, Memory, Seen
from watch import Outage, watched

HONEST_KEY = "honest-0123456789abcdef"
HOSTILE_KEY = "hostile-0123456789abcdef"
CLIENTS = 8
RETRIES = 20
QUESTIONS = 12
MAX_MODEL_LEN = 1024
LONGEST_TOKENS = 400
STALL_SECONDS = 20
STOPPED_SECONDS = 4.0
MEMORY_PAUSE_SECONDS = 2.0
SETTLED_SECONDS = 120.0
FLAGS = (
    "--demo",
    *SMALL,
    f"--max-model-len={MAX_MODEL_LEN}",
    "--max-num-batched-tokens=128",
    "--max-buffered-size=128MiB",
    "--dtype=float32",
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
    "--logits-processors=hostile.poison:Poison",
    f"--stall-timeout={STALL_SECONDS}",
    "--admin-api-key=operator-0123456789abcdef",
    "--api-key",
    HONEST_KEY,
    HOSTILE_KEY,
)
"""Defaults otherwise: the budget of restarts is that of an operator who chose nothing.

What a long prompt adds to each token of everybody else is the time of one step, and what a long
context adds that of its attention. Both are for the operator to choose, and in a model this small
they are nearly all of a step. The bounds of memory that are sizes are in proportion to the engine,
as is `VLLM_XGRAMMAR_CACHE_MB`.
"""


@dataclass(frozen=True, slots=True)
class Storm:
    """What is done to a server, and for how long."""

    seed: int
    seconds: float
    alone_seconds: float
    outside_faults: Sequence[str] = ()
    """Struck one each at random moments, by us; the budget of restarts has to bear them."""
    names: Sequence[str] = ()
    """The attacks that are drawn; all where none is named."""
    lanes: int = 4
    attack_seconds: float = 20.0
    calm: float = 0.4
    """The part of the time in which no request crashes."""

    def plan(self, server: Server) -> Plan:
        """What the adversary is told."""
        return Plan(
            port=int(server.url.rpartition(":")[2]),
            key=HOSTILE_KEY,
            model=server.model,
            seed=self.seed,
            lanes=self.lanes,
            attack_seconds=self.attack_seconds,
            calm_seconds=self.calm * self.seconds,
            crash_pause_seconds=(1 - self.calm) * self.seconds / 10,
            names=self.names,
        )


def stormed(
    directory: Path, storm: Storm, *flags: str, environment: Mapping[str, str] | None = None
) -> Seen:
    """All that was seen of a server from its start to its end; `Seen.left` is what it left."""
    with TemporaryDirectory(prefix="storm-") as temporary:  # pytest's is too long for sockets
        own = {
            "PYTHONPATH": _importable(),
            "TMPDIR": temporary,
            "VLLM_XGRAMMAR_CACHE_MB": "64",
            **(environment or {}),
        }
        shared = left_in_shared_memory()
        with running(directory, *FLAGS, *flags, environment=own) as server:
            seen, family = _lived(server, storm)
        seen.left += [f"a process: {one}" for one in family if is_alive(one)]
        files = [one.name for one in Path(temporary).iterdir()]
        seen.left += [f"a file: {name}" for name in files if not _is_cache(name)]
        seen.left += [f"shared memory: {one}" for one in left_in_shared_memory() - shared]
        if QUERY_MARK in server.log:
            seen.left.append("a secret in the log")
    return seen


def _lived(server: Server, storm: Storm) -> tuple[Seen, set[psutil.Process]]:
    """What was seen of a server that is stopped in the end, and the last of its processes."""
    server.use_key(HONEST_KEY)
    server.until_ready(deadline_seconds=3 * READY_DEADLINE_SECONDS)
    memory = Memory(held_bytes(server))
    # The processes that try grammars start with the first one, and stay. So does a thread of zmq,
    # with the first message to the engine that is large.
    choices = [f"{number:0>100}" for number in range(1000)]
    assert server.completion("a", structured_outputs={"choice": choices}).status_code == 200
    asked = questions(storm.seed, count=QUESTIONS, longest_tokens=LONGEST_TOKENS)
    expected = undisturbed(server, asked)
    alone = _alone(server, expected, storm)
    before = Belongings.of(server)
    with ExitStack() as stack:
        watch = stack.enter_context(watched(server))
        stack.enter_context(_weighed(server, memory))
        load = stack.enter_context(
            loaded(server, expected, clients=CLIENTS, seed=storm.seed, retries=RETRIES)
        )
        attacks = stack.enter_context(adversary(storm.plan(server)))
        stopped: list[Outage] = []
        _struck(server, storm, stopped)
    seen = Seen(load, alone, STALL_SECONDS, attacks, watch, memory, stopped)
    family = descendants(server.process.pid)
    seen.left += _ended(server, before)
    return seen, family


def _alone(
    server: Server, expected: Mapping[Question, Answer], storm: Storm
) -> dict[Question, float]:
    """The slowest answer to each question beside the same clients."""
    with loaded(server, expected, clients=CLIENTS, seed=storm.seed) as load:
        time.sleep(storm.alone_seconds)
    assert not load.lost, load.lost
    assert not load.wrong, load.wrong
    slowest: dict[Question, float] = {}
    for answer in load.answers:
        seconds = answer.ended_seconds - answer.started_seconds
        slowest[answer.question] = max(seconds, slowest.get(answer.question, 0.0))
    assert set(slowest) == set(expected), "not every question was asked alone"
    return slowest


def _struck(server: Server, storm: Storm, stopped: list[Outage]) -> None:
    """Return when the storm is over, or the server; strike the faults from outside meanwhile."""
    chosen = Random(storm.seed)
    started = time.monotonic()
    moments = sorted(chosen.uniform(0.1, 0.9) for _ in storm.outside_faults)
    for moment, name in zip(moments, storm.outside_faults, strict=True):
        if _is_over(server, started + moment * storm.seconds):
            return
        with suppress(ValueError, psutil.Error):  # at this moment there may be no engine
            _strike(server, name, stopped)
    _is_over(server, started + storm.seconds)


def _strike(server: Server, name: str, stopped: list[Outage]) -> None:
    number, _, title = name.partition(" ")
    process = Patient(server, Path()).process(title)
    process.send_signal(signal.Signals[number])
    if number == "SIGSTOP":
        began = time.monotonic()
        _is_over(server, began + STOPPED_SECONDS)
        process.resume()
        stopped.append(Outage(began, time.monotonic()))


def _is_over(server: Server, end_seconds: float) -> bool:
    """Whether the server ended before this moment, which is awaited."""
    with suppress(subprocess.TimeoutExpired):
        server.process.wait(max(0.0, end_seconds - time.monotonic()))
    return server.process.poll() is not None


def _ended(server: Server, before: Belongings) -> Iterator[str]:
    """Stop the server; what did not go as it should."""
    if server.process.poll() is not None:
        yield f"the server ended: exit {server.process.returncode}, {server.last_line}"
        return
    server.until_ready(deadline_seconds=2 * READY_DEADLINE_SECONDS)
    try:
        wait_until(
            lambda: Belongings.of(server).is_within(before),
            deadline_seconds=SETTLED_SECONDS,
            what=lambda: f"{before} has become {Belongings.of(server)}",
        )
    except AssertionError as error:
        yield str(error)
    code = server.stop()
    if code != 0:
        yield f"exit {code}: {server.last_line}"


@contextmanager
def adversary(plan: Plan) -> Iterator[Attacks]:
    """While entered, the server is attacked; when left, every attack has ended."""
    attacks = Attacks()
    with subprocess.Popen(
        [sys.executable, "-m", "hostile"],
        env={**os.environ, "PYTHONPATH": _importable()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(asdict(plan)) + "\n")
        process.stdin.flush()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                attacks.read(line)

        reading = threading.Thread(target=read)
        reading.start()
        try:
            yield attacks
        finally:
            process.stdin.close()
            reading.join()
    assert process.returncode == 0


@contextmanager
def _weighed(server: Server, memory: Memory) -> Iterator[None]:
    """While entered, the memory of a server is looked at."""
    is_enough = threading.Event()

    def look() -> None:
        while not is_enough.wait(MEMORY_PAUSE_SECONDS):
            memory.note(held_bytes(server))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield
    finally:
        is_enough.set()
        looking.join()


def held_bytes(server: Server) -> dict[str, int]:
    """What the processes of a server hold for themselves, those of one name together."""
    held = Counter[str]()
    for pid in (server.process.pid, *(one.pid for one in descendants(server.process.pid))):
        with suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            rows = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
            held[name] += sum(int(row.split()[1]) * 1024 for row in rows if row.startswith("Pss:"))
    return held


def _is_cache(name: str) -> bool:
    """Whether torch keeps compiled code there for the next process."""
    return name.startswith("torchinductor_")


def _importable() -> str:
    """Where the bug that requests meet, and the adversary, are imported from."""
    here = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, here))
