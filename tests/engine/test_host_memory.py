"""The host's memory runs out: long prompts give way, and then the engine, also while it starts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import psutil
import pytest

from holdfast.demo.switches import DemoFault, DemoSwitches
from memory_cgroups import MemoryCgroup, memory_cgroup
from servers import SMALL, Server, descendants, has_ended, running, title_of
from untrained import untrained_demo

pytestmark = pytest.mark.engine

MIB = 1024 * 1024
LIMIT_BYTES = 4096 * MIB
"""Almost three times what the server takes."""
MARKS_MIB = (1792, 1024, 512)
"""Without the engine less is left than the first mark if it was ended at the last one."""
BELOW_MIB = 96
"""How far below a mark the neighbour goes: more than a short request takes, less than a level."""
LONG = [7] * 1500
"""A prompt of more than one step."""
OTHER_LONG = [8] * 1600
"""One of which nothing is cached, since no other test sends it."""
AS_LONG = [9] * len(OTHER_LONG)
STEP_TOKENS = 1024
LATER_STEPS = 4
PREFILL = [10] * (1 + LATER_STEPS) * STEP_TOKENS
"""A prompt whose steps can be slow, except the first."""
PREFILL_SECONDS = 5.0
"""How much longer such a step takes then, so that all of them outlast what they are needed for."""
SLOW_SECONDS = 600.0
"""Longer than it takes to eat the memory."""
LOADS_FOR_LONG = ("--load-format=dummy", '--hf-overrides={"num_hidden_layers": 2000}')
"""Flags of a model that loads for many times as long as the guard takes to act."""
WAITING = "waiting until the host has enough memory"
NEIGHBOUR = """
import os, sys
from pathlib import Path
Path(sys.argv[1]).write_text(str(os.getpid()))
held = []
for line in sys.stdin:
    wanted = int(line)
    del held[wanted:]
    held += [bytearray(b"x") * (1 << 20) for _ in range(wanted - len(held))]
    print(flush=True)
"""


class Neighbour:
    """A process in the server's cgroup that holds as much memory as a test says."""

    def __init__(self, group: MemoryCgroup, process: subprocess.Popen[str]) -> None:
        self._group = group
        self._process = process
        self._held_mib = 0

    def hold(self, mib: int) -> None:
        """Hold this much, from now on."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{mib}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "\n"
        self._held_mib = mib

    def eat_below(self, mark_mib: int) -> None:
        """Eat at once until clearly less than a mark is left."""
        self.hold(self._held_mib + self._group.left_bytes // MIB - (mark_mib - BELOW_MIB))

    def give_back(self) -> None:
        """Hold nothing."""
        self.hold(0)


@contextmanager
def neighbour(group: MemoryCgroup) -> Iterator[Neighbour]:
    """A neighbour that holds nothing yet."""
    with subprocess.Popen(
        [sys.executable, "-c", NEIGHBOUR, str(group.members)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Neighbour(group, process)
        finally:
            process.kill()


@contextmanager
def under_load(server: Server) -> Iterator[list[int]]:
    """Short requests one after another from two clients, and the status of each answer."""
    codes: list[int] = []
    stopping = Event()

    def ask() -> None:
        while not stopping.is_set():
            codes.append(server.completion([7] * 20, timeout=180).status_code)

    with ThreadPoolExecutor(2) as clients:
        asking = [clients.submit(ask) for _ in range(2)]
        try:
            yield codes
        finally:
            stopping.set()
        for one in asking:
            one.result()


@pytest.fixture(scope="module")
def group() -> Iterator[MemoryCgroup]:
    """A cgroup for the server and its neighbour."""
    with memory_cgroup(LIMIT_BYTES) as made:
        yield made


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server keeps its state."""
    return tmp_path_factory.mktemp("memory")


@pytest.fixture(scope="module")
def slow_step(directory: Path) -> Path:
    """A file that makes the next full step take longer than the engine lives."""
    return directory / "slow"


@pytest.fixture(scope="module")
def slow_prefill(directory: Path) -> list[Path]:
    """Files that make the later steps of a long prompt slow, in their order."""
    return [directory / f"slow {step}" for step in range(LATER_STEPS)]


@pytest.fixture(scope="module")
def server(
    group: MemoryCgroup, directory: Path, slow_step: Path, slow_prefill: list[Path], models: Path
) -> Iterator[Server]:
    """The demo model in the cgroup, READY."""
    fault = DemoFault(
        "step_tokens", STEP_TOKENS, "slow", seconds=SLOW_SECONDS, armed_by=str(slow_step)
    )
    later = (
        DemoFault(
            "continuation",
            step * STEP_TOKENS - STEP_TOKENS // 2,
            "slow",
            until=step * STEP_TOKENS + STEP_TOKENS // 2 - 1,
            seconds=PREFILL_SECONDS,
            armed_by=str(path),
        )
        for step, path in enumerate(slow_prefill, start=1)
    )
    model = untrained_demo(models, DemoSwitches(faults=(fault, *later)))
    joined = ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group.members))
    command = (*joined, sys.executable, "-m", "holdfast", "serve")
    marks = ",".join(f"{mark}MiB" for mark in MARKS_MIB)
    # No prompt is given up because a slow machine has it wait for long.
    waits = ("--hold-timeout=600", f"--host-memory-marks={marks}")
    flags = (str(model), *SMALL, "--dtype=float32", *waits)
    with running(directory, *flags, command=command) as started:
        started.until_ready()
        yield started


def until_left(server: Server, *, below_mib: int) -> None:
    """Wait until the server has found that less than this is left."""
    server.until(
        lambda: server.metric("host_memory_available_bytes") < below_mib * MIB,
        f"less than {below_mib} MiB",
    )


def actions(server: Server, action: str) -> float:
    """How often the server did this for lack of memory."""
    return server.metric("host_memory_actions_total", action=action)


def until_answered(server: Server, codes: list[int]) -> None:
    """Wait until both clients of short requests have had another answer."""
    seen = len(codes)
    server.until(lambda: len(codes) > seen + 2, "answers to short requests")


def test_a_prompt_that_is_processed_is_given_up(
    server: Server, group: MemoryCgroup, slow_prefill: list[Path]
) -> None:
    """The engine does not compute the rest of it, and goes on with other requests."""
    with neighbour(group) as other, ThreadPoolExecutor(1) as asking:
        for path in slow_prefill:
            path.touch()
        asked = asking.submit(server.completion, PREFILL, timeout=600)
        server.until(lambda: not slow_prefill[0].exists(), "a slow step")
        other.eat_below(MARKS_MIB[1])
        refused = asked.result()
        assert (refused.status_code, refused.headers["x-should-retry"]) == (429, "true")
        assert server.completion([7] * 20, timeout=180).status_code == 200
    assert slow_prefill[-1].exists()
    slow_prefill[-1].unlink()
    assert actions(server, "give_up") == 1
    assert server.metric("engine_deaths_total") == 0


def test_long_prompts_give_way_and_then_the_engine(server: Server, group: MemoryCgroup) -> None:
    """Short requests are answered all the while, and the kernel has nobody to kill.

    The next engine waits while a neighbour stays.
    """
    first, second, last = MARKS_MIB
    held = actions(server, "hold")
    with (
        neighbour(group) as other,
        under_load(server) as codes,
        ThreadPoolExecutor(1) as asking,
    ):
        other.eat_below(first)
        until_left(server, below_mib=first)
        waits = asking.submit(server.completion, LONG, timeout=180)
        server.until(lambda: actions(server, "hold") == held + 1, "a long prompt that waits")
        until_answered(server, codes)
        assert not waits.done()
        other.give_back()
        assert waits.result().status_code == 200

        other.eat_below(first)
        until_left(server, below_mib=first)
        given_up = asking.submit(server.completion, LONG, timeout=180)
        server.until(lambda: actions(server, "hold") == held + 2, "another one")
        other.eat_below(second)
        refused = given_up.result()
        assert (refused.status_code, refused.headers["x-should-retry"]) == (429, "true")
        assert "short of memory" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 0
        until_answered(server, codes)
        assert server.metric("engine_deaths_total") == 0

        other.eat_below(last)
        server.until(
            lambda: server.metric("engine_deaths_total", cause="host_memory") == 1, "the end"
        )
        server.until(lambda: WAITING in server.get("/livez").json()["reason"], "a start that waits")
        assert (server.state, server.get("/livez").status_code) == ("RECOVERING", 200)
        other.give_back()
        server.until_ready()
        assert server.completion(LONG).status_code == 200
    assert set(codes) == {200}
    assert (server.metric("engine_deaths_total"), actions(server, "end")) == (1, 1)
    assert server.metric("requests_lost_total") == 0
    assert group.oom_kills == 0


def end_while_processed(
    server: Server, group: MemoryCgroup, slow_step: Path, prompt: list[int]
) -> int:
    """Have the engine ended while it processes a prompt, and return what the client gets."""
    ended = server.metric("engine_deaths_total", cause="host_memory")
    with neighbour(group) as other, ThreadPoolExecutor(1) as asking:
        slow_step.touch()
        asked = asking.submit(server.completion, prompt, timeout=600)
        server.until(lambda: not slow_step.exists(), "the step")
        other.eat_below(MARKS_MIB[-1])
        server.until(
            lambda: server.metric("engine_deaths_total", cause="host_memory") > ended, "the end"
        )
        other.give_back()
        server.until_ready()
        return int(asked.result().status_code)


def test_a_prompt_that_may_have_taken_the_memory_is_suspected(
    server: Server, group: MemoryCgroup, directory: Path, slow_step: Path
) -> None:
    """Its size is left out the next time; once may be chance, so it is not in the journal yet."""
    # It may have been given up before the engine was.
    assert end_while_processed(server, group, slow_step, OTHER_LONG) in {200, 429}
    assert not list(directory.rglob("probe-*.json"))
    assert f"a context of {len(OTHER_LONG)} tokens was being processed when the host" in server.log


def test_a_size_that_was_there_both_times_is_left_out(
    server: Server, group: MemoryCgroup, directory: Path, slow_step: Path
) -> None:
    """It is in the journal, so the next engine is proven without it, and refuses such prompts."""
    size = len(AS_LONG)
    assert end_while_processed(server, group, slow_step, AS_LONG) in {400, 429}
    journaled = [json.loads(path.read_text()) for path in directory.rglob("probe-*.json")]
    assert [record["context_tokens"] for record in journaled] == [size]
    assert server.metric("probe_proven_tokens") < size
    assert server.completion(OTHER_LONG).status_code == 400
    assert server.completion(LONG).status_code == 200


def test_a_start_that_takes_the_memory_of_its_host_is_ended(tmp_path: Path) -> None:
    """With marks that no reading is above: nothing of the engine is left; the last line says why.

    An engine that loads can freeze a machine as well as one that serves.
    """
    most_bytes = psutil.virtual_memory().total - 1
    marks = f"--host-memory-marks={most_bytes},{most_bytes},{most_bytes}"
    with running(tmp_path, "--demo", *SMALL, *LOADS_FOR_LONG, marks) as server:
        engine = server.until(
            lambda: [p for p in descendants(server.process.pid) if "EngineCore" in title_of(p)],
            "EngineCore",
        )
        assert server.wait() == 3
        assert "the host ran out of memory while the engine started: " in server.last_line
        assert all(has_ended(process) for process in engine)
