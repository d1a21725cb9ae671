"""What the server does while the host runs out of memory, and what the next engine learns of it."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import pytest

from fake_host import GIB, FakeHost
from holdfast.engine.replay import ReplayManager
from holdfast.engine.requests.long_prompts import long_prompt_tokens
from holdfast.errors import (
    ExitCode,
    HostFullError,
    HostMemoryError,
    NodeFullError,
    RequestLostError,
)
from holdfast.host_memory.guard import MemoryGuard
from holdfast.labels import MemoryAction
from holdfast.lifecycle.memory_relief import MemoryRelief
from holdfast.lifecycle.states import State
from holdfast.probe import ProbeJournals
from holdfast.records import Death, HostMemory, RankStats
from holdfast.request_context import REQUEST, RequestContext
from holdfast.settings import GuardMode, MemorySettings
from sample_status import a_rank
from scripted_life import (
    DEADLINE_SECONDS,
    LIMITED,
    PLUG_PULLED,
    REFUSING,
    SHORT,
    Halt,
    Life,
    ScriptedEngine,
    World,
    lived,
)
from scripted_llm import AnsweredError, PlainOutputs
from sleepers import sleeping
from stub_engine import FACTS, FakeClock

MARKS = (4 * GIB, 2 * GIB, GIB)
RUNBOOK = Path(__file__).parents[3] / "deploy/runbooks/holdfasthostmemorylow.md"
LONG = long_prompt_tokens(FACTS) + 1


@dataclass
class Scene:
    """A relief of a fake host, and what it did."""

    host: FakeHost
    mode: GuardMode = "on"
    hold_timeout_seconds: float = 600.0
    actions: list[MemoryAction] = field(default_factory=list)
    journals: ProbeJournals = field(default_factory=lambda: ProbeJournals(None))

    def __post_init__(self) -> None:
        self.relief = MemoryRelief(
            MemorySettings(guard=self.mode),
            hold_timeout_seconds=self.hold_timeout_seconds,
            on_action=self.actions.append,
            journals=self.journals,
            guard=MemoryGuard(MARKS, root=self.host.root, interval_seconds=0.01),
        )

    @property
    def forbidden_tokens(self) -> int | None:
        """The smallest context that no later probe may try."""
        return self.journals.opened("f").forbidden_tokens

    def play(self, act: Callable[[], Awaitable[None]]) -> None:
        """Run `act` within a deadline, while the host is watched."""

        async def within_time() -> None:
            async with asyncio.timeout(DEADLINE_SECONDS), self.relief.running():
                await act()

        asyncio.run(within_time())

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return when a condition is true; the deadline is that of the scene."""
        while not condition():  # noqa: ASYNC110 - another thread brings it about
            await asyncio.sleep(0.01)


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    """A host that has all its memory left."""
    return FakeHost(tmp_path / "host")


def engine(*, is_unified_memory: bool = False) -> ScriptedEngine:
    """An engine that serves."""
    made = ScriptedEngine(1, ())
    made.facts = replace(FACTS, is_unified_memory=is_unified_memory)
    return made


async def ask(
    requests: ReplayManager, prompt: str, tokens: int, *, is_probe: bool = False
) -> object:
    """A request; its answer, or the error that it gets."""
    REQUEST.set(RequestContext(is_probe=is_probe))
    arguments = {"prompt": prompt, "request_id": prompt, "tokens": tokens}
    try:
        return [output async for output in requests.run("generate", arguments)]
    except AnsweredError as answered:
        return answered.error


@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_an_engine_on_unified_memory_leaves_what_the_guard_needs(
    host: FakeHost, mode: GuardMode
) -> None:
    """Only where it would act."""
    assert Scene(host, mode).relief.kept_bytes() == (0 if mode == "off" else 4.5 * GIB)


@asynccontextmanager
async def holding_long_prompts(scene: Scene) -> AsyncIterator[ReplayManager]:
    """The requests of an engine whose host is below the first mark."""
    requests, running = ReplayManager(PlainOutputs()), engine()
    requests.engine_started(running.llm, 1)
    requests.open()
    requests.long_prompts.engine_started(FACTS, tuple)
    with scene.relief.guarding(running, requests):
        scene.host.leave(3 * GIB)
        await scene.until(lambda: requests.long_prompts.are_held)
        yield requests


@asynccontextmanager
async def living(
    world: World, scene: Scene, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[Life]:
    """A server whose host is watched; it is stopped at the end."""
    life = Life(world, memory=scene.relief, clock=clock)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(life.run())
        yield life
        life.supervisor.request_stop()


@asynccontextmanager
async def reading(
    world: World, tokens: int, *, is_probe: bool = False
) -> AsyncIterator[asyncio.Task[object]]:
    """While entered, the running engine has a prompt of this length, and does not finish it."""
    llm = world.engines[-1].llm
    llm.hold()
    world.requests.long_prompts.engine_started(FACTS, lambda: tuple(llm.running))
    asking = asyncio.create_task(ask(world.requests, f"long {tokens}", tokens, is_probe=is_probe))
    await llm.until_received(len(llm.received) + 1)
    try:
        yield asking
    finally:
        asking.cancel()


def test_long_prompts_wait_below_the_first_mark(host: FakeHost) -> None:
    """And go on when there is enough again."""
    scene = Scene(host)

    async def act() -> None:
        async with holding_long_prompts(scene) as requests:
            waiting = asyncio.create_task(ask(requests, "long", LONG))
            await scene.until(lambda: requests.held == 1)
            assert isinstance(await ask(requests, "short", 1), list)
            host.leave(50 * GIB)
            assert isinstance(await waiting, list)
        assert scene.actions == ["hold"]

    scene.play(act)


def test_they_are_given_up_below_the_second(host: FakeHost) -> None:
    """One after another: what waits is the last."""
    scene = Scene(host)

    async def act() -> None:
        async with holding_long_prompts(scene) as requests:
            waiting = asyncio.create_task(ask(requests, "long", LONG))
            await scene.until(lambda: requests.held == 1)
            host.leave(GIB * 3 // 2)
            assert isinstance(await waiting, HostMemoryError)
        assert scene.actions == ["hold", "give_up"]

    scene.play(act)


def test_no_prompt_waits_longer_than_a_recovery_may_take(host: FakeHost) -> None:
    """With `--hold-timeout 0` none waits at all."""
    scene = Scene(host, hold_timeout_seconds=0.0)

    async def act() -> None:
        async with holding_long_prompts(scene) as requests:
            assert isinstance(await ask(requests, "long", LONG), HostMemoryError)

    scene.play(act)


@pytest.mark.parametrize(
    ("mode", "is_unified_memory", "is_guarded"),
    [("auto", True, True), ("auto", False, False), ("on", False, True)],
)
def test_only_an_engine_that_can_take_the_hosts_memory_is_guarded(
    host: FakeHost, mode: GuardMode, *, is_unified_memory: bool, is_guarded: bool
) -> None:
    """The others are not to blame, unless an operator says so; the metrics tell in any case."""
    scene = Scene(host, mode)

    async def act() -> None:
        requests = ReplayManager(PlainOutputs())
        with scene.relief.guarding(engine(is_unified_memory=is_unified_memory), requests) as end:
            host.leave(GIB // 2)
            await scene.until(
                lambda: scene.relief.last() == HostMemory(GIB // 2, host.total_bytes, None)
            )
            if is_guarded:
                assert (await end).cause == "host_memory"
            assert end.done() == is_guarded

    scene.play(act)


@pytest.mark.parametrize(
    ("mode", "is_unified_memory", "is_guarded"),
    [("auto", True, True), ("auto", False, False), ("on", False, True)],
)
def test_a_start_that_takes_the_last_memory_is_ended(
    host: FakeHost, mode: GuardMode, *, is_unified_memory: bool, is_guarded: bool
) -> None:
    """It may be the engine that freezes the host, before it has answered anything."""
    scene = Scene(host, mode)
    looks = list[int]()

    async def act() -> None:
        with sleeping() as process:
            rank = replace(a_rank(), pid=process.pid, is_unified_memory=is_unified_memory)
            ranks = noted(looks, [rank])
            found = asyncio.create_task(scene.relief.until_out_of_memory(ranks))
            host.leave(GIB // 2)
            await scene.until(lambda: found.done() or len(looks) > 3)
            assert found.done() == is_guarded
            if is_guarded:
                assert (await found).startswith("512 MiB were available")
                assert process.wait(DEADLINE_SECONDS) == -signal.SIGKILL
            assert (process.poll() is None) != is_guarded
            found.cancel()
        assert scene.actions == (["end"] if is_guarded else [])

    scene.play(act)


def test_a_start_is_ended_although_the_loop_stands_still(host: FakeHost) -> None:
    """A host that runs out of memory may leave it no time; the reason is told later."""
    scene = Scene(host)
    looks = list[int]()

    async def act() -> None:
        with sleeping() as process:
            ranks = noted(looks, [replace(a_rank(), pid=process.pid)])
            found = asyncio.create_task(scene.relief.until_out_of_memory(ranks))
            await scene.until(lambda: len(looks) > 1)
            host.leave(0)
            assert process.wait(DEADLINE_SECONDS) == -signal.SIGKILL  # which the loop waits for
            assert (await found).startswith("0 MiB were available")

    scene.play(act)


def test_a_rank_that_reports_later_is_ended_too(host: FakeHost) -> None:
    """A start is guarded from the first report on, and all ranks end together."""
    scene = Scene(host)
    looks = list[int]()

    async def act() -> None:
        with sleeping() as first, sleeping() as second:
            ranks = [replace(a_rank(), pid=process.pid) for process in (first, second)]
            reported = list[RankStats]()
            starting = scene.relief.until_out_of_memory(noted(looks, reported))
            found = asyncio.create_task(starting)
            for rank in ranks:
                reported.append(rank)
                seen = len(looks)
                await scene.until(lambda seen=seen: len(looks) > seen + 1)  # type: ignore[misc]
            host.leave(0)
            await found
            for process in (first, second):
                assert process.wait(DEADLINE_SECONDS) == -signal.SIGKILL

    scene.play(act)


def noted(looks: list[int], ranks: list[RankStats]) -> Callable[[], tuple[RankStats, ...]]:
    """What reads the reports of ranks, and notes how often it was asked."""

    def read() -> tuple[RankStats, ...]:
        looks.append(len(looks))
        return tuple(ranks)

    return read


@dataclass
class Shortage:
    """A stage that finds too little memory in the first starts that it is asked for."""

    starts: int
    error: type[HostFullError] = HostFullError

    async def __call__(self) -> None:
        if self.starts:
            self.starts -= 1
            raise self.error("the host ran out of memory while the engine started")


def test_a_start_without_memory_waits_until_there_is_enough(host: FakeHost, tmp_path: Path) -> None:
    """A neighbour has taken it: it costs no restart, and nothing that was learned."""
    scene, world = Scene(host), World(tmp_path, ranks=(SHORT,))

    async def act() -> None:
        async with living(world, scene) as life:
            await life.until(State.READY)
            world.starting = Shortage(1)
            host.leave(GIB // 2)
            await scene.until(lambda: "waiting until the host has enough" in life.reasons[-1])
            assert "512 MiB were available" in life.supervisor.status().detail
            host.leave(50 * GIB)
            await life.until(State.READY)
        assert life.error is None
        assert [death.cause for death in world.deaths] == ["host_memory", "host_memory"]
        assert [bool(spec.learned) for spec in world.specs] == [False, True, True]

    scene.play(act)


def test_a_wait_for_memory_is_not_remembered_as_part_of_a_recovery(
    host: FakeHost, tmp_path: Path
) -> None:
    """It can take any time, which the next recovery does not."""
    scene, world, clock = Scene(host), World(tmp_path), FakeClock()

    async def act() -> None:
        async with living(world, scene, clock) as life:
            await life.until(State.READY)
            host.leave(GIB // 2)
            await scene.until(lambda: "waiting until the host has enough" in life.reasons[-1])
            clock.now_seconds += 3600
            host.leave(50 * GIB)
            await life.until(State.READY)

    scene.play(act)
    (times,) = (tmp_path / "learned").glob("times-*.json")
    assert json.loads(times.read_text())["recovery"] == [0]


def test_a_reservation_that_takes_all_memory_at_every_start_is_given_up(
    host: FakeHost, tmp_path: Path
) -> None:
    """There was enough before each of them, so no neighbour is to blame."""
    scene, world = Scene(host), World(tmp_path)

    async def act() -> None:
        async with living(world, scene) as life:
            await life.until(State.READY)
            world.ranks = (REFUSING,)
            world.engines[-1].ranks = lambda **_: (REFUSING,)  # type: ignore[method-assign]
            world.starting = Shortage(2)
            world.engines[-1].die(PLUG_PULLED)
            await life.until(State.RECOVERING)
            world.ranks = (a_rank(),)
            await life.until(State.READY)
        assert [bool(spec.learned) for spec in world.specs] == [False, True, True, False]

    scene.play(act)


@pytest.mark.parametrize(("error", "counted"), [(HostFullError, []), (NodeFullError, ["end"])])
def test_a_start_that_the_guard_of_another_node_ended_is_counted(
    host: FakeHost, tmp_path: Path, error: type[HostFullError], counted: list[MemoryAction]
) -> None:
    """The guard of this node has counted its own before the start is known to have failed."""
    scene, world = Scene(host), World(tmp_path)

    async def act() -> None:
        async with living(world, scene) as life:
            await life.until(State.READY)
            world.starting = Shortage(1, error)
            world.engines[-1].die(PLUG_PULLED)
            await life.until(State.RECOVERING)
            await life.until(State.READY)
        assert scene.actions == counted

    scene.play(act)


def test_a_first_start_without_memory_ends_the_server(tmp_path: Path) -> None:
    """Nothing was served yet, and the flags may ask for too much."""
    life = lived(World(tmp_path, starting=Shortage(1)))
    assert isinstance(life.error, HostFullError)
    assert life.error.exit_code == ExitCode.ENGINE_START


def test_a_guard_that_is_off_reads_nothing(host: FakeHost) -> None:
    """There is nothing to show either."""
    scene = Scene(host, "off")

    async def act() -> None:
        host.leave(0)
        with scene.relief.guarding(engine(), ReplayManager(PlainOutputs())) as end:
            assert not end.done()
        assert scene.relief.last() is None

    scene.play(act)


def ended_twice(
    scene: Scene, world: World, tokens: tuple[int, int], end: Callable[[], None]
) -> Life:
    """The life of a server whose host runs out of memory twice, while it reads prompts."""
    lives = list[Life]()

    async def act() -> None:
        async with living(world, scene) as life:
            lives.append(life)
            for size in tokens:
                await life.until(State.READY)
                async with reading(world, size):
                    end()
                    await life.until(State.RECOVERING)
                    scene.host.leave(50 * GIB)
                    await life.until(State.READY)

    scene.play(act)
    return lives[0]


def test_the_next_engine_leaves_out_what_took_the_memory(host: FakeHost, tmp_path: Path) -> None:
    """The second time: the death has a cause of its own, and the size is kept before the start."""
    scene, world = Scene(host), World(tmp_path)
    life = ended_twice(scene, world, (500, 510), lambda: host.leave(GIB // 2))
    assert life.supervisor.status().engine.last_exit.startswith("host_memory: 512 MiB")
    assert scene.actions.count("end") == 2
    assert scene.forbidden_tokens == 510
    # The longest prompt has 509 tokens now, and its answer one.
    assert [engine.context_limit_tokens for engine in world.engines] == [None, None, 510]


def test_the_runbook_quotes_the_log(
    host: FakeHost, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it says is refused is refused: nothing the first time, the size the second time."""
    ended_twice(Scene(host), World(tmp_path), (500, 500), lambda: host.leave(GIB // 2))
    quoted = [" ".join(one.split()) for one in re.findall(r"`([^`]+)`", RUNBOOK.read_text())]
    first, second = (one.replace("N", "500") for one in quoted if "left out" in one)
    assert caplog.text.index(first) < caplog.text.index(second)


def test_the_next_engine_leaves_out_what_took_the_memory_of_another_node(
    host: FakeHost, tmp_path: Path
) -> None:
    """Its guard knows no requests, and counts nothing; this host has enough."""
    scene, world = Scene(host), World(tmp_path)
    death = Death("host_memory", "node b: 512 MiB were available")
    ended_twice(scene, world, (500, 500), lambda: world.engines[-1].die(death))
    assert scene.actions == ["end", "end"]
    assert scene.forbidden_tokens == 500
    assert world.engines[-1].context_limit_tokens == 500


def test_what_is_shorter_than_what_was_there_before_is_not_left_out_yet(
    host: FakeHost, tmp_path: Path
) -> None:
    """Neither size has been there twice, so both may have been there by chance."""
    scene, world = Scene(host), World(tmp_path)
    ended_twice(scene, world, (510, 500), lambda: host.leave(GIB // 2))
    assert scene.forbidden_tokens is None


def test_a_proof_that_takes_the_last_memory_is_made_again_without_the_size(
    host: FakeHost, tmp_path: Path
) -> None:
    """The proof has not failed: the next engine proves what is left."""
    scene, probing = Scene(host), Halt()
    world = World(tmp_path, reports=(LIMITED,), probing=probing)

    async def act() -> None:
        async with living(world, scene) as life:
            await probing.entered.wait()
            async with reading(world, 500, is_probe=True) as asking:
                host.leave(GIB // 2)
                await life.until(State.RECOVERING)
                host.leave(50 * GIB)
                probing.released.set()
                await life.until(State.READY)
                assert isinstance(await asking, RequestLostError)
        assert life.error is None
        states = [state for state, _ in groupby(life.states)]  # it may wait for the memory, too
        assert states[:5] == ["STARTING", "PROBING", "RECOVERING", "PROBING", "READY"]
        assert "one request" not in world.events
        assert scene.forbidden_tokens == 500
        assert scene.actions == ["end"]

    scene.play(act)


@pytest.mark.parametrize("tokens", [8, 500])
def test_an_image_that_takes_the_last_memory_forbids_no_context(
    host: FakeHost, tmp_path: Path, tokens: int
) -> None:
    """However many tokens it has: its encoder took the memory, and the next probe leaves it out."""
    scene, probing = Scene(host), Halt()
    world = World(tmp_path, reports=(LIMITED,), probing=probing)

    async def act() -> None:
        async with living(world, scene) as life:
            await probing.entered.wait()
            with scene.journals.opened("f").image_attempt(3072):
                async with reading(world, tokens, is_probe=True):
                    host.leave(GIB // 2)
                    await life.until(State.RECOVERING)
            host.leave(50 * GIB)
            probing.released.set()
            await life.until(State.READY)
        assert scene.journals.opened("f").forbidden_image == (3072, None)
        assert scene.forbidden_tokens is None

    scene.play(act)


def test_a_death_without_a_long_prompt_forbids_nothing(host: FakeHost, tmp_path: Path) -> None:
    """A neighbour took the memory: the next engine serves what this one did."""
    scene, world = Scene(host), World(tmp_path)

    async def act() -> None:
        async with living(world, scene) as life:
            await life.until(State.READY)
            host.leave(GIB // 2)
            await life.until(State.RECOVERING)
            host.leave(50 * GIB)
            await life.until(State.READY)
        assert scene.forbidden_tokens is None
        assert world.engines[1].context_limit_tokens is None

    scene.play(act)
