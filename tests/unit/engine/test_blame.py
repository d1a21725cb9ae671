"""What a death shows of the requests that were there: refused, tried, quarantined or charged."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from call_bench import KILLED, RAISED, TRIAL_SECONDS, Bench, lifted, on_the_bench
from callers import PlainDialect, ScriptedLLM
from fakes import FakeClock
from holdfast.engine import blame
from holdfast.engine.blame import KEPT, TRIABLE_SECONDS, Verdict
from holdfast.engine.replay import LONGEST_NAME, Calls
from holdfast.engine.request import Call
from holdfast.engine.suspicions import Suspicions
from holdfast.errors import NotReadyError, QuarantinedError, SuspectedError
from holdfast.records import Death, Suspect
from holdfast.request_context import REQUEST, RequestContext

OUT_OF_MEMORY = Death("out_of_memory", "EngineCore was killed by SIGKILL")
TERMINATED = Death("terminated", "EngineCore received SIGTERM")
REFUSED = Death("workspace_rejection", "Workspace is locked", is_accusing=True)
ENDED = NotReadyError("The server has shut down.", retry_after_seconds=5)


def named(*names: str, cause: Any = "core_exit", reached_tokens: int = 1) -> Death:
    """A death in a step of exactly these requests."""
    suspects = tuple(Suspect(name, reached_tokens, is_prefill=False) for name in names)
    return Death(cause, "ended by SIGSEGV", is_accusing=True, suspects=suspects)


async def killed(
    bench: Bench, death: Death, prompts: Sequence[str], *, held: int | None = None, key: str = ""
) -> tuple[list[asyncio.Task[Any]], Verdict]:
    """Calls that the engine has when it dies, of which so many are held afterwards."""
    bench.start().hold()
    calls = [bench.call(prompt, context=RequestContext(key=key)) for prompt in prompts]
    await bench.llm.until_received(len(prompts))
    verdict = bench.bury(death)
    await bench.until_held(len(prompts) if held is None else held)
    return calls, verdict


def test_a_lone_suspect_is_answered_at_once() -> None:
    """No engine is needed to say no; its neighbours are made again."""

    async def scene(bench: Bench) -> None:
        (bad, good), verdict = await killed(bench, named("bad"), ["bad", "good"], held=1)
        with lifted(SuspectedError):
            await bad
        assert verdict == Verdict(1, has_suspects=True)
        bench.start()
        await good
        assert bench.llm.received == ["good"]
        assert bench.calls.lost["suspected"] == 1

    on_the_bench(scene)


def test_a_suspect_is_told_not_to_come_again() -> None:
    """Else a client or a balancer carries it to the next engine."""
    context = RequestContext()

    async def scene(bench: Bench) -> None:
        bench.start().hold()
        call = bench.call("bad", context=context)
        await bench.llm.until_received(1)
        bench.bury(RAISED)
        with lifted(SuspectedError):
            await call

    on_the_bench(scene)
    assert context.may_be_retried is False


def test_the_like_of_a_suspect_is_quarantined_with_a_second_death() -> None:
    """From then on it is refused at the door, before anything of an answer is sent."""

    async def scene(bench: Bench) -> None:
        for name, error in (("bad#1", SuspectedError), ("bad#2", QuarantinedError)):
            (call,), _ = await killed(bench, RAISED, [name], held=0)
            with lifted(error):
                await call
        bench.start()
        context = RequestContext()
        REQUEST.set(context)
        with lifted(QuarantinedError):
            bench.calls.run("generate", {"prompt": "bad#3", "request_id": "bad#3"})
        assert context.may_be_retried is False
        await bench.call("other")
        assert bench.llm.received == ["other"]
        assert bench.calls.lost["quarantined"] == 2

    on_the_bench(scene)


def test_a_suspect_among_others_is_known_again() -> None:
    """A like of it, of the same key, is in the step: nobody needs to be tried."""

    async def scene(bench: Bench) -> None:
        (call,), _ = await killed(bench, RAISED, ["bad#1"], held=0, key="a")
        with lifted(SuspectedError):
            await call
        prompts = ["good", "bad#2"]
        (good, bad), verdict = await killed(bench, RAISED, prompts, held=1, key="a")
        with lifted(QuarantinedError):
            await bad
        assert verdict.explained == 1
        bench.start(is_open=False)
        assert await bench.calls.try_suspects(TRIAL_SECONDS)
        assert not bench.llm.received
        bench.calls.opened()
        await good

    on_the_bench(scene)


def test_nobody_is_quarantined_for_being_near_the_request_of_another_key() -> None:
    """Its own first death may have been the fault of the machine: it is tried, and passes."""

    async def scene(bench: Bench) -> None:
        (call,), _ = await killed(bench, RAISED, ["popular"], held=0, key="victim")
        with lifted(SuspectedError):
            await call
        bench.start().hold()
        calls = [
            bench.call("popular#2", context=RequestContext(key="other")),
            bench.call("killer", context=RequestContext(key="attacker")),
        ]
        await bench.llm.until_received(2)
        bench.bury(RAISED)
        await bench.until_held(2)
        bench.start(ScriptedLLM(poison="killer"), is_open=False)
        assert not await bench.calls.try_suspects(TRIAL_SECONDS)
        assert bench.bury(RAISED) == Verdict(2, is_charged=True, has_suspects=True)
        bench.start()
        await calls[0]
        with lifted(QuarantinedError):
            await calls[1]
        await bench.call("popular#3", context=RequestContext(key="victim"))

    on_the_bench(scene)


def test_suspects_are_tried_one_at_a_time() -> None:
    """In an engine that nobody else uses, and nobody but the suspects."""

    async def scene(bench: Bench) -> None:
        calls, verdict = await killed(bench, named("a", "b", "c"), ["a", "b", "c", "d"])
        assert verdict == Verdict(has_suspects=True)
        llm = bench.start(ScriptedLLM(answers=3), is_open=False)
        assert await bench.calls.try_suspects(TRIAL_SECONDS)
        assert llm.received == ["a", "b", "c"]
        assert llm.most_running == 1
        bench.calls.opened()
        await asyncio.gather(*calls)

    on_the_bench(scene)


def test_those_least_likely_to_have_done_it_are_tried_first() -> None:
    """A key with few requests among the suspects, and with few deaths, before the others."""

    async def scene(bench: Bench) -> None:
        bench.start().hold()
        for name, key in (("x", "many"), ("y", "many"), ("z", "few")):
            bench.call(name, context=RequestContext(key=key))
        await bench.llm.until_received(3)
        bench.bury(RAISED)
        await bench.until_held(3)
        llm = bench.start(is_open=False)
        await bench.calls.try_suspects(TRIAL_SECONDS)
        assert llm.received[0] == "z"

    on_the_bench(scene)


def test_what_ends_an_engine_alone_is_quarantined() -> None:
    """Its neighbours are served, and its like is refused at the door."""

    async def scene(bench: Bench) -> None:
        (good, bad, fine), _ = await killed(bench, RAISED, ["good", "bad", "fine"])
        bench.start(ScriptedLLM(poison="bad"), is_open=False)
        assert not await bench.calls.try_suspects(TRIAL_SECONDS)
        assert bench.bury(RAISED).explained == 2
        with lifted(QuarantinedError):
            await bad
        bench.start(is_open=False)
        assert await bench.calls.try_suspects(TRIAL_SECONDS)
        bench.calls.opened()
        await asyncio.gather(good, fine)
        with lifted(QuarantinedError):
            await bench.call("bad#2")

    on_the_bench(scene)


def test_trials_end_two_engines_at_most() -> None:
    """What is left then is refused untried, and everybody else goes on."""

    async def scene(bench: Bench) -> None:
        names = ["k1", "k2", "k3", "k4"]
        calls, _ = await killed(bench, named(*names), ["good", *names])
        for _ in range(2):
            bench.start(ScriptedLLM(poison="k1 k2 k3 k4"), is_open=False)
            assert not await bench.calls.try_suspects(TRIAL_SECONDS)
            bench.bury(RAISED)
        bench.start(is_open=False)
        assert await bench.calls.try_suspects(TRIAL_SECONDS)
        assert not bench.llm.received
        bench.calls.opened()
        await calls[0]
        outcomes = await asyncio.gather(*calls[1:], return_exceptions=True)
        kinds = sorted(type(outcome.error).__name__ for outcome in outcomes)  # type: ignore[union-attr]
        assert kinds == ["QuarantinedError"] * 2 + ["SuspectedError"] * 2

    on_the_bench(scene)


def test_a_key_with_many_killers_takes_no_request_of_another_with_it() -> None:
    """A key's are tried together first, and one by one only where the engine dies of them."""

    async def scene(bench: Bench) -> None:
        bench.start().hold()
        killers = ["k1", "k2", "k3", "k4"]
        bad = [bench.call(name, context=RequestContext(key="bad")) for name in killers]
        good = [bench.call(f"good{at}", context=RequestContext(key="good")) for at in range(8)]
        await bench.llm.until_received(12)
        bench.bury(RAISED)
        await bench.until_held(12)
        explained = 0
        for _ in range(2):
            bench.start(ScriptedLLM(poison=" ".join(killers)), is_open=False)
            assert not await bench.calls.try_suspects(TRIAL_SECONDS)
            explained += bench.bury(RAISED).explained
        assert explained == 3
        bench.start(is_open=False)
        assert await bench.calls.try_suspects(TRIAL_SECONDS)
        bench.calls.opened()
        await asyncio.gather(*good)
        outcomes = await asyncio.gather(*bad, return_exceptions=True)
        kinds = sorted(type(outcome.error).__name__ for outcome in outcomes)  # type: ignore[union-attr]
        assert kinds == ["QuarantinedError"] + ["SuspectedError"] * 3

    on_the_bench(scene)


def test_trials_take_the_time_of_one_start_at_most() -> None:
    """Over all engines that they need."""
    clock = FakeClock()

    async def scene(bench: Bench) -> None:
        bench.calls = Calls(PlainDialect(), clock=clock)
        (first, second), _ = await killed(bench, RAISED, ["a", "b"])
        bench.start(is_open=False).hold()
        trials = asyncio.create_task(bench.calls.try_suspects(TRIAL_SECONDS))
        await bench.llm.until_received(1)
        clock.now_seconds += TRIAL_SECONDS
        bench.llm.release()
        assert await trials
        with lifted(SuspectedError):
            await second
        bench.calls.opened()
        await first

    on_the_bench(scene)


@pytest.mark.parametrize("death", [KILLED, TERMINATED, OUT_OF_MEMORY])
def test_a_signal_from_outside_accuses_nobody(death: Death) -> None:
    """Neither at the first death nor during a trial, which is made again."""

    async def scene(bench: Bench) -> None:
        calls, _ = await killed(bench, RAISED, ["a", "b"])
        llm = bench.start(is_open=False)
        llm.hold()
        trial = asyncio.create_task(bench.calls.try_suspects(TRIAL_SECONDS))
        await llm.until_received(1)
        assert bench.bury(death) == Verdict()
        await trial
        bench.start(is_open=False)
        assert await bench.calls.try_suspects(TRIAL_SECONDS)
        bench.calls.opened()
        await asyncio.gather(*calls)
        assert set(bench.calls.lost.values()) == {0}

    on_the_bench(scene)


@pytest.mark.parametrize("death", [KILLED, OUT_OF_MEMORY])
def test_what_is_there_at_two_deaths_in_a_row_is_a_suspect(death: Death) -> None:
    """Whatever the deaths were: made again once, and not twice."""

    async def scene(bench: Bench) -> None:
        (bad,), verdict = await killed(bench, death, ["bad"])
        assert verdict == Verdict()
        bench.start().hold()
        await bench.llm.until_received(1)
        assert bench.bury(death).explained == 1
        with lifted(SuspectedError):
            await bad
        bench.start()
        await bench.call("bad")  # nobody accused it: it is not kept

    on_the_bench(scene)


def test_a_refused_workspace_is_made_again_once() -> None:
    """The next start reserves what it asked for; if that was not enough, it is a suspect."""

    async def scene(bench: Bench) -> None:
        (long,), verdict = await killed(bench, REFUSED, ["long"])
        assert verdict == Verdict()
        bench.start().hold()
        await bench.llm.until_received(1)
        bench.bury(REFUSED)
        with lifted(SuspectedError):
            await long

    on_the_bench(scene)


def test_a_suspect_is_acquitted_once_it_is_past_the_point() -> None:
    """It is not run to its end in the trial, however long its answer is."""

    async def scene(bench: Bench) -> None:
        death = named("a", "b", cause="stall", reached_tokens=3)
        calls, _ = await killed(bench, death, ["a", "b"])
        bench.start(ScriptedLLM(answers=1000), is_open=False)
        await bench.calls.try_suspects(TRIAL_SECONDS)
        assert not bench.llm.running
        bench.calls.fail(ENDED, "drained")
        await asyncio.wait(calls)

    on_the_bench(scene)


def test_leaving_during_a_trial_acquits_nobody() -> None:
    """The trial goes on without its client, and its like is refused."""

    async def scene(bench: Bench) -> None:
        (bad, good), _ = await killed(bench, RAISED, ["bad", "good"])
        bench.start(ScriptedLLM(poison="bad"), is_open=False).hold()
        trials = asyncio.create_task(bench.calls.try_suspects(TRIAL_SECONDS))
        await bench.llm.until_received(1)
        bad.cancel()
        await asyncio.wait({bad})
        bench.llm.release()
        assert not await trials
        bench.bury(RAISED)
        with lifted(QuarantinedError):
            await bench.call("bad#2")
        good.cancel()

    on_the_bench(scene)


@pytest.mark.parametrize("passed_seconds", [0.0, TRIABLE_SECONDS + 1])
def test_leaving_before_the_death_helps_nobody(passed_seconds: float) -> None:
    """The step names the request when its client is gone, also long after."""
    clock = FakeClock()

    async def scene(bench: Bench) -> None:
        bench.calls = Calls(PlainDialect(), clock=clock)
        for attempt in (1, 2):
            bench.start().hold()
            call = bench.call(f"bad#{attempt}")
            await bench.llm.until_received(1)
            call.cancel()
            await asyncio.wait({call})
            clock.now_seconds += passed_seconds
            assert bench.bury(named(f"bad#{attempt}")).explained == 1
        with lifted(QuarantinedError):
            await bench.call("bad#3")

    on_the_bench(scene)


def test_a_crowd_that_leaves_makes_no_death_the_servers_own() -> None:
    """Who did it is not known any more, but that a client did: it must not spend the budget."""

    async def scene(bench: Bench) -> None:
        bench.start().hold()
        for number, prompt in enumerate(["bad", *["other"] * KEPT], start=1):
            call = bench.call(f"{prompt}#{number}")
            await bench.llm.until_received(number)
            call.cancel()
            await asyncio.wait({call})
        assert bench.bury(named("bad#1", cause="stall")) == Verdict(has_suspects=True)

    on_the_bench(scene)


def test_a_crowd_that_leaves_hides_nothing_that_the_engine_hangs_in() -> None:
    """What is in the running step is kept, whoever comes and goes after it."""

    async def scene(bench: Bench) -> None:
        bench.calls.in_step = lambda: ("bad#1",)
        bench.start().hold()
        for number, prompt in enumerate(["bad", *["other"] * KEPT], start=1):
            call = bench.call(f"{prompt}#{number}")
            await bench.llm.until_received(number)
            call.cancel()
            await asyncio.wait({call})
        assert bench.bury(named("bad#1", cause="stall")).explained == 1

    on_the_bench(scene)


def test_what_left_long_before_a_death_without_names_is_no_suspect_of_it() -> None:
    """The engine was done with it."""
    clock = FakeClock()

    async def scene(bench: Bench) -> None:
        bench.calls = Calls(PlainDialect(), clock=clock)
        bench.start().hold()
        innocent = bench.call("innocent")
        await bench.llm.until_received(1)
        innocent.cancel()
        await asyncio.wait({innocent})
        clock.now_seconds += TRIABLE_SECONDS + 1
        bad = bench.call("bad")
        await bench.llm.until_received(2)
        assert bench.bury(RAISED).explained == 1
        with lifted(SuspectedError):
            await bad

    on_the_bench(scene)


def test_what_waits_for_its_turn_is_no_suspect() -> None:
    """The engine has had nothing of it, so that the only one that it had is alone."""

    async def scene(bench: Bench) -> None:
        bench.calls.unsent = lambda _: frozenset({"waiting"})
        (bad, waiting), verdict = await killed(bench, RAISED, ["bad", "waiting"], held=1)
        assert verdict.explained == 1
        with lifted(SuspectedError):
            await bad
        bench.start()
        await waiting

    on_the_bench(scene)


def test_a_stream_that_kills_is_tried_without_its_client() -> None:
    """It cannot be made again for its client, but it can be tried."""

    async def scene(bench: Bench) -> None:
        bench.start(ScriptedLLM(answers=2)).hold()
        other = bench.call("other")
        await bench.llm.until_received(1)
        outputs = bench.calls.run("generate", {"prompt": "bad", "request_id": "bad"})
        bench.llm.release()
        await anext(outputs)
        bench.llm.hold()
        bench.llm.die()
        await asyncio.gather(other, anext(outputs, None), return_exceptions=True)
        bench.bury(named("bad", "gone"))
        bench.start(ScriptedLLM(poison="bad"), is_open=False)
        assert not await bench.calls.try_suspects(TRIAL_SECONDS)
        bench.bury(RAISED)
        with lifted(QuarantinedError):
            await bench.call("bad")

    on_the_bench(scene)


def test_nobody_is_alone_in_a_step_with_a_request_that_nobody_knows() -> None:
    """It is tried like one of several."""

    async def scene(bench: Bench) -> None:
        (call,), verdict = await killed(bench, named("known", "unknown"), ["known"])
        assert verdict.explained == 0
        bench.start(is_open=False)
        assert await bench.calls.try_suspects(TRIAL_SECONDS)
        bench.calls.opened()
        await call

    on_the_bench(scene)


def test_a_request_that_was_answered_is_no_neighbour_in_the_step_before() -> None:
    """What the engine gave back it has finished without harm."""
    before = Suspect("answered", 1, is_prefill=False, is_in_running_step=False)

    async def scene(bench: Bench) -> None:
        bad_suspect = Suspect("bad", 1, is_prefill=True)
        death = Death("core_exit", "", is_accusing=True, suspects=(bad_suspect, before))
        (bad,), verdict = await killed(bench, death, ["bad"], held=0)
        assert verdict.explained == 1
        with lifted(SuspectedError):
            await bad

    on_the_bench(scene)


def test_an_explained_death_is_charged_to_the_key() -> None:
    """After three within an hour it has to wait until the oldest of them is an hour old."""
    clock = FakeClock()

    async def scene(bench: Bench) -> None:
        bench.calls = Calls(PlainDialect(), Suspicions(clock=clock))
        for number in range(3):
            assert not bench.calls.suspended_seconds("a")
            (call,), verdict = await killed(bench, RAISED, [f"bad {number}"], held=0, key="a")
            assert verdict.is_charged
            with lifted(SuspectedError):
                await call
            clock.now_seconds += 600
        assert bench.calls.suspended_seconds("a") == 3600 - 3 * 600
        assert not bench.calls.suspended_seconds("b")
        clock.now_seconds += 3600 - 3 * 600
        assert not bench.calls.suspended_seconds("a")

    on_the_bench(scene)


def test_no_suspect_is_told_to_come_again_when_the_server_ends() -> None:
    """One that waits for its trial is sent nowhere else; one that waits for nothing may go."""

    async def scene(bench: Bench) -> None:
        suspect, waiting = RequestContext(), RequestContext()
        bench.start().hold()
        calls = [bench.call(name, context=suspect) for name in ("a", "b")]
        await bench.llm.until_received(2)
        bench.bury(RAISED)
        calls.append(bench.call("late", context=waiting))
        await bench.until_held(3)
        bench.calls.fail(ENDED, "engine_lost")
        await asyncio.wait(calls)
        assert suspect.may_be_retried is False
        assert waiting.may_be_retried is True

    on_the_bench(scene)


def test_a_name_that_fits_nowhere_is_replaced() -> None:
    """By another for each; a usual one stays as it is."""

    async def scene(bench: Bench) -> None:
        seen: list[str] = []

        class Named(ScriptedLLM):
            async def generate(self, prompt: str, **arguments: Any) -> Any:
                seen.append(arguments["request_id"])
                async for output in super().generate(prompt):
                    yield output

        bench.start(Named())
        for name in ("cmpl-1", "x" * 5000, "x" * 5001, "a\nb", "\ud800"):
            arguments = {"prompt": "p", "request_id": name}
            assert [output async for output in bench.calls.run("generate", arguments)]
        assert seen[0] == "cmpl-1"
        assert len(set(seen)) == 5
        assert all(len(name) <= LONGEST_NAME and name.isprintable() for name in seen)

    on_the_bench(scene)


def test_what_is_known_outlives_the_process(tmp_path: Path) -> None:
    """A container that is started again refuses the same requests."""
    path = tmp_path / "state" / "suspicions-x.json"

    async def scene(bench: Bench) -> None:
        bench.calls = Calls(PlainDialect(), Suspicions(path))
        for _ in range(2):
            (call,), _ = await killed(bench, RAISED, ["bad"], held=0, key="a")
            await asyncio.wait({call})
        bench.calls.save()
        again = Calls(PlainDialect(), Suspicions(path))
        with lifted(QuarantinedError):
            again.run("generate", {"prompt": "bad", "request_id": "r"})

    on_the_bench(scene)
    assert "bad" not in path.read_text().replace("suspicions", "")


def test_the_prompts_of_those_who_left_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first are forgotten for the last, and their digests are not."""
    monkeypatch.setattr(blame, "TRIABLE_BYTES", 10)

    async def scene(bench: Bench) -> None:
        bench.start().hold()
        for prompt in ("first-", "second", "third-"):
            call = bench.call(prompt)
            await bench.llm.until_received(1)
            bench.llm.received.clear()
            call.cancel()
            await asyncio.wait({call})
        bench.bury(named("first-"))
        bench.start().hold()
        call = bench.call("first-")
        await bench.llm.until_received(1)
        bench.bury(named("first-"))
        with lifted(QuarantinedError):
            await call

    forgotten: list[str] = []
    forget = Call.forget_prompt

    def note(call: Call) -> None:
        forgotten.append(call.request_id)
        forget(call)

    monkeypatch.setattr(Call, "forget_prompt", note)
    on_the_bench(scene)
    assert forgotten == ["first-", "second"]


def test_the_prompt_of_who_left_is_digested_by_another_thread() -> None:
    """With images it takes long, and nobody has to wait for that."""
    threads: list[int] = []

    class Dialect(PlainDialect):
        """It notes who asks."""

        def identity(self, arguments: Mapping[str, Any]) -> str:
            threads.append(threading.get_ident())
            return super().identity(arguments)

    async def scene(bench: Bench) -> None:
        bench.calls = Calls(Dialect())
        bench.start().hold()
        call = bench.call("a")
        await bench.llm.until_received(1)
        call.cancel()
        await asyncio.wait({call})
        while not threads:  # noqa: ASYNC110 - another thread fills it
            await asyncio.sleep(0.01)
        bench.bury(named("a"))

    on_the_bench(scene)
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
