"""An adversary with API keys of its own attacks a server that eight honest clients use."""

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

from faults import FaultyServer, left_in_shared_memory
from holdfast.processes.exits import is_alive
from hostile import crashes
from hostile.__main__ import Plan
from hostile.target import QUERY_MARK
from hostile_report import Attacks, HostileReport, Memory, ResourceCounts, require_released
from load_generator import Answer, Question, loaded, questions, undisturbed
from server_watch import Outage, watched
from servers import (
    KV_CACHE_BYTES,
    READY_DEADLINE_SECONDS,
    Server,
    descendants,
    running,
    wait_until,
)
from untrained import untrained_demo

HONEST_KEY = "honest-0123456789abcdef"
HOSTILE_KEYS = tuple(f"hostile-{number}-0123456789abcdef" for number in range(5))
"""One for all attacks that leave the engine alive, and one for each killer of a run."""
CLIENTS = 8
RETRIES = 20
QUESTIONS = 12
MAX_MODEL_LEN = 1024
MAX_TOKENS = 400
STALL_SECONDS = 20
STOPPED_SECONDS = 4.0
MEMORY_PAUSE_SECONDS = 2.0
SETTLED_SECONDS = 120.0
ASKED_SECONDS = 120.0
FLAGS = (
    "--served-model-name=holdfast-demo",
    "--enforce-eager",
    f"--kv-cache-memory-bytes={KV_CACHE_BYTES}",
    "--max-num-seqs=40",
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
    *HOSTILE_KEYS,
)
"""Everything else is at its default, so the restart budget is that of an operator who set nothing.

A long prompt adds the time of one step to every other client's token, and a long context adds the
time of its attention. An operator chooses how large both may be; in a model this small they are
nearly all of a step. The engine takes 16 sequences of the honest clients beside as many of the
attacks' key and some of the killers': they ask for two each at most, so that none waits for the
answer to another of their own. Limits that are sizes of memory are in proportion to the engine, as
is `VLLM_XGRAMMAR_CACHE_MB`.
"""


@dataclass(frozen=True, slots=True)
class HostileRun:
    """What a server has to withstand, and for how long."""

    seed: int
    seconds: float
    alone_seconds: float
    outside_faults: Sequence[str] = ()
    """Faults that the test injects itself, each once, at random moments, within the budget."""
    names: Sequence[str] = ()
    """The attacks to draw from; empty for all of them."""
    meets_killers: bool = False
    """Whether it is long enough for each killer of its seed to meet an engine."""
    lanes: int = 4
    attack_seconds: float = 20.0
    calm: float = 0.4
    """The fraction of the time in which no request makes the engine crash."""

    @property
    def killers(self) -> list[str]:
        """The requests that end the engine, of all or of the attacks that are named."""
        return [name for name in crashes.ATTACKS if name in self.names] or (
            [] if self.names else crashes.of_seed(self.seed)
        )

    def plan(self, server: Server) -> Plan:
        """Return the plan for the process of the adversary."""
        return Plan(
            port=int(server.url.rpartition(":")[2]),
            key=HOSTILE_KEYS[0],
            killer_keys=HOSTILE_KEYS[1:],
            model=server.model,
            seed=self.seed,
            lanes=self.lanes,
            attack_seconds=self.attack_seconds,
            calm_seconds=self.calm * self.seconds,
            crash_pause_seconds=(1 - self.calm) * self.seconds / 10,
            killers=self.killers,
            names=self.names,
        )


def run_hostile(
    directory: Path, run: HostileRun, *flags: str, environment: Mapping[str, str] | None = None
) -> HostileReport:
    """Run a server from its start to its end, and report; `left` says what it did not clean up."""
    with TemporaryDirectory(prefix="adversary-") as temporary:  # pytest's is too long for sockets
        own = {
            "PYTHONPATH": importable(),
            "TMPDIR": temporary,
            "VLLM_XGRAMMAR_CACHE_MB": "64",
            **(environment or {}),
        }
        shared = left_in_shared_memory()
        model = str(untrained_demo(directory / "models"))
        with running(directory, model, *FLAGS, *flags, environment=own) as server:
            report, family = _observed(server, run)
        report.left += [f"a process: {one}" for one in family if is_alive(one)]
        files = [one for one in Path(temporary).iterdir() if not _is_trial_of_python(one)]
        report.left += [f"a file: {one.name}" for one in files if not _is_compile_cache(one.name)]
        report.left += [f"shared memory: {one}" for one in _left_for_good(shared)]
        if QUERY_MARK in server.log:
            report.left.append("a secret in the log")
    return report


def _is_trial_of_python(path: Path) -> bool:
    """Return whether `tempfile` wrote it to try the directory, in a process that was killed then.

    https://github.com/python/cpython/blob/3.11/Lib/tempfile.py#L190
    """
    return len(path.name) == 8 and path.is_file() and path.read_bytes() in {b"", b"blat"}


def _left_for_good(before: set[Path]) -> set[Path]:
    """Return what nobody removes: another server of this machine may just be ending its engine."""
    deadline = time.monotonic() + SETTLED_SECONDS
    while (left := left_in_shared_memory() - before) and time.monotonic() < deadline:
        time.sleep(1)
    return left


def _observed(server: Server, run: HostileRun) -> tuple[HostileReport, set[psutil.Process]]:
    """Report on a server, stop it, and return the processes that it had at the end."""
    server.use_key(HONEST_KEY)
    started = time.monotonic()
    server.until_ready(deadline_seconds=3 * READY_DEADLINE_SECONDS)
    start_seconds = time.monotonic() - started
    memory = Memory(held_bytes(server))
    # The first grammar starts the processes that compile them, and the first large message to the
    # engine a thread of zmq; both stay.
    large = {"type": "boolean", "description": "x" * 100_000}
    server.until(
        lambda: server.completion("a", structured_outputs={"json": large}).status_code == 200,
        "the first grammar",
    )
    asked = questions(run.seed, count=QUESTIONS, longest_tokens=MAX_TOKENS)
    expected = undisturbed(server, asked)
    alone = _slowest_unattacked(server, expected, run)
    before = ResourceCounts.of(server)
    with ExitStack() as stack:
        watch = stack.enter_context(watched(server))
        stack.enter_context(_memory_sampled(server, memory))
        load = stack.enter_context(
            loaded(server, expected, clients=CLIENTS, seed=run.seed, retries=RETRIES)
        )
        attacks = stack.enter_context(adversary(run.plan(server)))
        stopped: list[Outage] = []
        _inject_faults(server, run, stopped)
    report = HostileReport(
        load,
        alone,
        STALL_SECONDS,
        attacks,
        watch,
        memory,
        stopped,
        start_seconds=start_seconds,
        killers=run.killers if run.meets_killers else (),
    )
    family = descendants(server.process.pid)
    report.left += _stop_and_check(server, before)
    return report, family


def _slowest_unattacked(
    server: Server, expected: Mapping[Question, Answer], run: HostileRun
) -> dict[Question, float]:
    """Return the time of the slowest answer to each question, with the same clients."""
    with loaded(server, expected, clients=CLIENTS, seed=run.seed) as load:
        time.sleep(run.alone_seconds)
        wait_until(
            lambda: {answer.question for answer in load.answers} == set(expected),
            deadline_seconds=ASKED_SECONDS,
            what=lambda: "not every question was asked alone",
        )
    assert not load.lost, load.lost
    assert not load.wrong, load.wrong
    slowest: dict[Question, float] = {}
    for answer in load.answers:
        seconds = answer.ended_seconds - answer.started_seconds
        slowest[answer.question] = max(seconds, slowest.get(answer.question, 0.0))
    return slowest


def _inject_faults(server: Server, run: HostileRun, stopped: list[Outage]) -> None:
    """Inject the outside faults; return when the time is over or the server has ended."""
    chosen = Random(run.seed)
    started = time.monotonic()
    moments = sorted(chosen.uniform(0.1, 0.9) for _ in run.outside_faults)
    for moment, name in zip(moments, run.outside_faults, strict=True):
        if _ended_before(server, started + moment * run.seconds):
            return
        with suppress(ValueError, psutil.Error):  # at this moment there may be no engine
            _inject(server, name, stopped)
    _ended_before(server, started + run.seconds)


def _inject(server: Server, name: str, stopped: list[Outage]) -> None:
    number, _, title = name.partition(" ")
    process = FaultyServer(server, Path()).process(title)
    process.send_signal(signal.Signals[number])
    if number == "SIGSTOP":
        began = time.monotonic()
        _ended_before(server, began + STOPPED_SECONDS)
        process.resume()
        stopped.append(Outage(began, time.monotonic()))


def _ended_before(server: Server, end_seconds: float) -> bool:
    """Wait until this moment, or until the server ends; return whether it ended."""
    with suppress(subprocess.TimeoutExpired):
        server.process.wait(max(0.0, end_seconds - time.monotonic()))
    return server.process.poll() is not None


def _stop_and_check(server: Server, before: ResourceCounts) -> Iterator[str]:
    """Stop the server, and yield what went wrong."""
    if server.process.poll() is not None:
        yield f"the server ended: exit {server.process.returncode}, {server.last_line}"
        return
    server.until_ready(deadline_seconds=2 * READY_DEADLINE_SECONDS)
    try:
        require_released(server, before, deadline_seconds=SETTLED_SECONDS)
    except AssertionError as error:
        yield str(error)
    code = server.stop()
    if code != 0:
        yield f"exit {code}: {server.last_line}"


@contextmanager
def adversary(plan: Plan) -> Iterator[Attacks]:
    """Attack the server until the context ends; every attack has ended by then."""
    attacks = Attacks()
    with subprocess.Popen(
        [sys.executable, "-m", "hostile"],
        env={**os.environ, "PYTHONPATH": importable()},
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
def _memory_sampled(server: Server, memory: Memory) -> Iterator[None]:
    """Note the memory of a server every two seconds until the context ends."""
    is_enough = threading.Event()

    def sample() -> None:
        while not is_enough.wait(MEMORY_PAUSE_SECONDS):
            memory.note(held_bytes(server))

    sampling = threading.Thread(target=sample)
    sampling.start()
    try:
        yield
    finally:
        is_enough.set()
        sampling.join()


def held_bytes(server: Server) -> dict[str, int]:
    """Return the `Pss` of the server's processes, added up by name."""
    held = Counter[str]()
    for pid in (server.process.pid, *(one.pid for one in descendants(server.process.pid))):
        with suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            rows = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
            held[name] += sum(int(row.split()[1]) * 1024 for row in rows if row.startswith("Pss:"))
    return held


def _is_compile_cache(name: str) -> bool:
    """Return whether torch keeps compiled code for the next process there."""
    return name.startswith("torchinductor_")


def importable() -> str:
    """Return the path from which the adversary, and the bug that it triggers, are imported."""
    here = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, here))
