"""What a death shows of the requests that were there: refused, tried, quarantined or charged."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine.replay import ReplayManager
from holdfast.engine.suspects.blame import BlameVerdict
from holdfast.engine.suspects.departed import TRIABLE_SECONDS
from holdfast.engine.suspects.suspicion_files import SuspicionFiles
from holdfast.engine.suspects.suspicions import Suspicions
from holdfast.errors import (
    NotReadyError,
    QuarantinedError,
    RequestLostError,
    SuspectedError,
)
from holdfast.labels import DeathCause, LossReason
from holdfast.records import Death, Suspect
from holdfast.request_context import REQUEST, RequestContext
from replay_harness import (
    KILLED,
    RAISED,
    TRIAL_SECONDS,
    ReplayHarness,
    answered,
    killed,
    named,
    run_scene,
)
from scripted_llm import DEADLINE_SECONDS, AnsweredError, PlainOutputs, ScriptedLLM
from stub_engine import FakeClock

OUT_OF_MEMORY = Death("out_of_memory", "EngineCore was killed by SIGKILL")
TERMINATED = Death("terminated", "EngineCore received SIGTERM")
REFUSED = Death("workspace_rejection", "Workspace is locked", blames_requests=True)
ENDED = NotReadyError("The server has shut down.", retry_after_seconds=5)


def test_a_lone_suspect_is_answered_at_once() -> None:
    """No engine is needed to say no; its neighbours are made again."""

    async def scene(harness: ReplayHarness) -> None:
        (bad, good), verdict = await killed(harness, named("bad"), ["bad", "good"], held=1)
        with answered(SuspectedError):
            await bad
        assert verdict == BlameVerdict(1, has_suspects=True)
        harness.start()
        await good
        assert harness.llm.received == ["good"]
        assert harness.requests.lost["suspected"] == 1

    run_scene(scene)


def test_a_restart_that_was_asked_for_accuses_nobody() -> None:
    """However often, and though a death came before: it shows nothing about a request."""

    async def scene(harness: ReplayHarness) -> None:
        (call,), _ = await killed(harness, OUT_OF_MEMORY, ["a"])
        for _ in range(2):
            harness.start().hold()
            await harness.llm.until_received(1)
            assert harness.bury(Death("requested", "new weights")) == BlameVerdict()
            await harness.until_held(1)
        harness.start()
        await call

    run_scene(scene)


def test_a_suspect_is_told_not_to_come_again() -> None:
    """Else a client or a balancer carries it to the next engine."""
    context = RequestContext()

    async def scene(harness: ReplayHarness) -> None:
        harness.start().hold()
        call = harness.call("bad", context=context)
        await harness.llm.until_received(1)
        harness.bury(RAISED)
        with answered(SuspectedError):
            await call

    run_scene(scene)
    assert context.may_be_retried is False


def test_the_like_of_a_suspect_is_quarantined_with_a_second_death() -> None:
    """From then on it is refused at the door, before anything of an answer is sent."""

    async def scene(harness: ReplayHarness) -> None:
        for name, error in (("bad#1", SuspectedError), ("bad#2", QuarantinedError)):
            (call,), _ = await killed(harness, RAISED, [name], held=0)
            with answered(error):
                await call
        harness.start()
        context = RequestContext()
        REQUEST.set(context)
        with answered(QuarantinedError):
            harness.requests.run("generate", {"prompt": "bad#3", "request_id": "bad#3"})
        assert context.may_be_retried is False
        await harness.call("other")
        assert harness.llm.received == ["other"]
        assert harness.requests.lost["quarantined"] == 2

    run_scene(scene)


def test_what_is_quarantined_is_so_for_all_keys_whatever_is_varied() -> None:
    """Else it would end engines for each key that sends it with a seed of its own."""

    async def scene(harness: ReplayHarness) -> None:
        for name in ("bad#1", "bad#2"):
            (call,), _ = await killed(harness, RAISED, [name], held=0, key="a")
            await asyncio.wait({call})
        harness.start()
        with answered(QuarantinedError):
            await harness.call("bad#3", context=RequestContext(key="b"))
        assert not harness.requests.suspended_seconds("b")

    run_scene(scene)


def test_a_suspect_among_others_is_known_again() -> None:
    """A like of it, of the same key, is in the step: nobody needs to be tried."""

    async def scene(harness: ReplayHarness) -> None:
        (call,), _ = await killed(harness, RAISED, ["bad#1"], held=0, key="a")
        with answered(SuspectedError):
            await call
        prompts = ["good", "bad#2"]
        (good, bad), verdict = await killed(harness, RAISED, prompts, held=1, key="a")
        with answered(QuarantinedError):
            await bad
        assert verdict.explained == 1
        assert await harness.try_suspects()
        assert not harness.llm.received
        harness.requests.open()
        await good

    run_scene(scene)


def test_suspects_of_a_key_that_has_ended_no_engine_are_not_digested() -> None:
    """There is nothing that they could be like, and all requests wait while the loop does that."""

    async def scene(harness: ReplayHarness) -> None:
        harness.suspicions.suspect("digest", "other")
        calls, _ = await killed(harness, RAISED, ["a", "b"], key="key")
        assert [request.digest for request in harness.requests._requests] == [None, None]
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)

    run_scene(scene)


def test_nobody_is_quarantined_for_being_near_the_request_of_another_key() -> None:
    """Its own first death may have been the fault of the machine: it is tried, and passes."""

    async def scene(harness: ReplayHarness) -> None:
        (call,), _ = await killed(harness, RAISED, ["popular"], held=0, key="victim")
        with answered(SuspectedError):
            await call
        harness.start().hold()
        requests = [
            harness.call("popular#2", context=RequestContext(key="other")),
            harness.call("killer", context=RequestContext(key="attacker")),
        ]
        await harness.llm.until_received(2)
        harness.bury(RAISED)
        await harness.until_held(2)
        assert not await harness.try_suspects(ScriptedLLM(poison="killer"))
        assert harness.bury(RAISED) == BlameVerdict(2, is_charged=True, has_suspects=True)
        harness.start()
        await requests[0]
        with answered(QuarantinedError):
            await requests[1]
        await harness.call("popular#3", context=RequestContext(key="victim"))

    run_scene(scene)


def test_what_ends_an_engine_alone_is_quarantined() -> None:
    """Its neighbours are served, and its like is refused at the door."""

    async def scene(harness: ReplayHarness) -> None:
        (good, bad, fine), _ = await killed(harness, RAISED, ["good", "bad", "fine"])
        assert not await harness.try_suspects(ScriptedLLM(poison="bad"))
        assert harness.bury(RAISED).explained == 2
        with answered(QuarantinedError):
            await bad
        assert await harness.try_suspects()
        harness.requests.open()
        await asyncio.gather(good, fine)
        with answered(QuarantinedError):
            await harness.call("bad#2")

    run_scene(scene)


@pytest.mark.parametrize("death", [KILLED, TERMINATED, OUT_OF_MEMORY])
def test_a_signal_from_outside_accuses_nobody(death: Death) -> None:
    """Neither at the first death nor during a trial, which is made again."""

    async def scene(harness: ReplayHarness) -> None:
        requests, _ = await killed(harness, RAISED, ["a", "b"])
        llm = harness.start(is_open=False)
        llm.hold()
        trial = asyncio.create_task(harness.requests.try_suspects(TRIAL_SECONDS))
        await llm.until_received(1)
        assert harness.bury(death) == BlameVerdict(has_suspects=death is not TERMINATED)
        await trial
        assert await harness.try_suspects()
        harness.requests.open()
        await asyncio.gather(*requests)
        assert set(harness.requests.lost.values()) == {0}

    run_scene(scene)


@pytest.mark.parametrize("death", [KILLED, OUT_OF_MEMORY])
def test_what_is_alone_at_two_deaths_in_a_row_is_not_made_again(death: Death) -> None:
    """Whatever the deaths were; a like of it may come once more."""

    async def scene(harness: ReplayHarness) -> None:
        (bad,), verdict = await killed(harness, death, ["bad"])
        assert verdict == BlameVerdict()
        harness.start().hold()
        await harness.llm.until_received(1)
        assert harness.bury(death) == BlameVerdict(2, has_suspects=True)
        with answered(SuspectedError):
            await bad
        harness.start()
        await harness.call("bad")

    run_scene(scene)


async def killed_twice(
    harness: ReplayHarness, death: Death, prompts: Sequence[str]
) -> list[asyncio.Task[Any]]:
    """Have requests in the engine at two deaths in a row, together with another one each time."""
    requests, _ = await killed(harness, death, prompts)
    harness.start().hold()
    newcomer = harness.call("newcomer")
    await harness.llm.until_received(len(prompts) + 1)
    assert harness.bury(death) == BlameVerdict(has_suspects=True)
    await harness.until_held(len(prompts) + 1)
    return [*requests, newcomer]


@pytest.mark.parametrize("death", [KILLED, TERMINATED, OUT_OF_MEMORY])
def test_an_engine_killed_twice_from_outside_loses_no_request(death: Death) -> None:
    """What was in both is tried, and answered; so is what came between."""

    async def scene(harness: ReplayHarness) -> None:
        requests = await killed_twice(harness, death, ["long"])
        llm = harness.start(is_open=False)
        assert await harness.requests.try_suspects(TRIAL_SECONDS)
        assert llm.received == ["long"]
        harness.requests.open()
        await asyncio.gather(*requests)
        assert set(harness.requests.lost.values()) == {0}

    run_scene(scene)


@pytest.mark.parametrize("death", [KILLED, OUT_OF_MEMORY])
def test_what_is_alone_at_the_third_death_in_a_row_is_a_suspect(death: Death) -> None:
    """Of several, each is tried; the key is charged once for the three deaths that are explained.

    It takes as many to have its like quarantined.
    """

    async def scene(harness: ReplayHarness) -> None:
        for error in (SuspectedError, QuarantinedError):
            requests = await killed_twice(harness, death, ["bad", "good"])
            assert not await harness.try_suspects(ScriptedLLM(poison="bad"))
            assert harness.bury(death) == BlameVerdict(3, has_suspects=True)
            with answered(error):
                await requests[0]
            assert await harness.try_suspects()
            harness.requests.open()
            await asyncio.gather(*requests[1:])

    run_scene(scene)


@pytest.mark.parametrize("cause", ["terminated", "host_memory", "node_lost", "requested"])
def test_a_trial_that_a_neighbour_or_an_operator_ends_convicts_nobody(cause: DeathCause) -> None:
    """Though it is the third death in a row: the request is tried again."""

    async def scene(harness: ReplayHarness) -> None:
        requests = await killed_twice(harness, KILLED, ["long"])
        assert not await harness.try_suspects(ScriptedLLM(poison="long"))
        assert harness.bury(Death(cause, "it ended")) == BlameVerdict()
        assert await harness.try_suspects()
        harness.requests.open()
        await asyncio.gather(*requests)

    run_scene(scene)


def test_a_client_that_leaves_is_in_two_deaths_in_a_row_with_its_like() -> None:
    """It is known by its digest and key; of another key it is another one."""

    async def scene(harness: ReplayHarness) -> None:
        verdicts = []
        for key in ("a", "b", "b"):
            harness.start().hold()
            call = harness.call("bad", context=RequestContext(key=key))
            await harness.llm.until_received(1)
            call.cancel()
            await asyncio.wait({call})
            verdicts.append(harness.bury(OUT_OF_MEMORY))
        possible = BlameVerdict(has_suspects=True)
        assert verdicts == [possible, possible, BlameVerdict(2, is_charged=True, has_suspects=True)]

    run_scene(scene)


def test_a_client_that_leaves_does_not_save_its_request_from_a_trial() -> None:
    """Though it leaves each time, and another request was there, too."""

    async def scene(harness: ReplayHarness) -> None:
        good = harness.call("good")
        for number in (1, 2):
            harness.start().hold()
            bad = harness.call(f"bad#{number}")
            await harness.llm.until_received(2)
            bad.cancel()
            await asyncio.wait({bad})
            assert harness.bury(OUT_OF_MEMORY) == BlameVerdict(has_suspects=True)
        await harness.until_held(1)
        assert not await harness.try_suspects(ScriptedLLM(poison="bad"))
        assert harness.bury(OUT_OF_MEMORY) == BlameVerdict(3, has_suspects=True)
        assert await harness.try_suspects()
        harness.requests.open()
        await good

    run_scene(scene)


def test_a_suspect_whose_client_has_left_is_refused_like_the_others() -> None:
    """One whose adapter is gone would end the engine in its trial, and the next one's."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start().hold()
        calls = [harness.call(name) for name in ("gone", "here")]
        await harness.llm.until_received(2)
        calls[0].cancel()
        await asyncio.wait({calls[0]})
        harness.bury(RAISED)
        await harness.until_held(1)
        known = {arguments["request_id"] for arguments in harness.requests.arguments()}
        assert known == {"gone", "here"}
        lost = RequestLostError("The LoRA adapter could not be loaded again.")
        harness.requests.refuse(lambda request: request.request_id == "gone", lost)
        assert await harness.try_suspects()
        assert harness.llm.received == ["here"]
        harness.requests.open()
        await calls[1]

    run_scene(scene)


def test_a_refused_workspace_is_made_again_once() -> None:
    """The next start reserves what it asked for; if that was not enough, it is a suspect."""

    async def scene(harness: ReplayHarness) -> None:
        (long,), verdict = await killed(harness, REFUSED, ["long"])
        assert verdict == BlameVerdict()
        harness.start().hold()
        await harness.llm.until_received(1)
        harness.bury(REFUSED)
        with answered(SuspectedError):
            await long

    run_scene(scene)


def test_a_first_refused_workspace_convicts_nobody_after_a_kill() -> None:
    """Though its step had one request only: the next start reserves what that one asked for."""

    async def scene(harness: ReplayHarness) -> None:
        calls, _ = await killed(harness, KILLED, ["a", "b"])
        harness.start().hold()
        await harness.llm.until_received(2)
        refused = replace(named("a"), cause="workspace_rejection")
        assert harness.bury(refused) == BlameVerdict(has_suspects=True)
        await harness.until_held(2)
        assert await harness.try_suspects()
        harness.requests.open()
        await asyncio.gather(*calls)

    run_scene(scene)


@pytest.mark.parametrize("passed_seconds", [0.0, TRIABLE_SECONDS + 1])
def test_leaving_before_the_death_helps_nobody(passed_seconds: float) -> None:
    """The step names the request when its client is gone, also long after."""
    clock = FakeClock()

    async def scene(harness: ReplayHarness) -> None:
        harness.requests = ReplayManager(PlainOutputs(), clock=clock)
        for attempt in (1, 2):
            harness.start().hold()
            call = harness.call(f"bad#{attempt}")
            await harness.llm.until_received(1)
            call.cancel()
            await asyncio.wait({call})
            clock.now_seconds += passed_seconds
            assert harness.bury(named(f"bad#{attempt}")).explained == 1
        with answered(QuarantinedError):
            await harness.call("bad#3")

    run_scene(scene)


def test_leaving_between_the_death_and_the_verdict_helps_nobody() -> None:
    """The engine has told all its callers that it is dead, and each waits for the next one."""

    async def scene(harness: ReplayHarness) -> None:
        for attempt in (1, 2):
            harness.start().hold()
            call = harness.call(f"bad#{attempt}", context=RequestContext(key="a"))
            await harness.llm.until_received(1)
            harness.llm.die()
            await harness.until_held(1)
            call.cancel()
            await asyncio.wait({call})
            verdict = harness.bury(named(f"bad#{attempt}"))
            assert verdict == BlameVerdict(1, is_charged=True, has_suspects=True)
        with answered(QuarantinedError):
            await harness.call("bad#3")

    run_scene(scene)


def test_leaving_after_the_verdict_is_nothing_to_the_next_engine() -> None:
    """A caller that waits for that leaves before it is there."""

    async def scene(harness: ReplayHarness) -> None:
        (call,), _ = await killed(harness, OUT_OF_MEMORY, ["a"])
        call.cancel()
        await asyncio.wait({call})
        harness.start()
        assert harness.bury(OUT_OF_MEMORY) == BlameVerdict()

    run_scene(scene)


def test_what_a_dead_engine_had_is_not_left_in_the_next() -> None:
    """Its client reads slowly, and disconnects before it has heard of the death."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start(ScriptedLLM(answers=3))
        stream = harness.requests.run("generate", {"prompt": "read", "request_id": "read"})
        await anext(stream)
        assert harness.bury(OUT_OF_MEMORY) == BlameVerdict()
        harness.start()
        await stream.aclose()  # type: ignore[attr-defined]  # it is a generator
        assert harness.bury(OUT_OF_MEMORY) == BlameVerdict()

    run_scene(scene)


def test_a_stream_that_hears_of_a_death_late_was_not_in_the_next_engine() -> None:
    """Its client reads slowly, and it cannot go on."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start(ScriptedLLM(answers=3))
        stream = harness.requests.run("generate", {"prompt": "read", "request_id": "read"})
        await anext(stream)
        harness.bury(OUT_OF_MEMORY)
        harness.start()
        with answered(RequestLostError):
            await anext(stream)
        assert harness.bury(OUT_OF_MEMORY) == BlameVerdict()

    run_scene(scene)


def test_what_waits_for_its_turn_is_no_suspect() -> None:
    """The engine has had nothing of it, so that the only one that it had is alone."""

    async def scene(harness: ReplayHarness) -> None:
        harness.requests.presence.unsent = lambda *_: frozenset({"waiting"})
        (bad, waiting), verdict = await killed(harness, RAISED, ["bad", "waiting"], held=1)
        assert verdict.explained == 1
        with answered(SuspectedError):
            await bad
        harness.start()
        await waiting

    run_scene(scene)


def test_what_comes_after_the_death_is_no_suspect() -> None:
    """Nothing of it was sent; it waits, and no engine counts as its first before the next."""
    context = RequestContext(key="b")

    async def scene(harness: ReplayHarness) -> None:
        harness.start()
        harness.llm.die()
        late = harness.call("late", context=context)
        await harness.until_held(1)
        assert harness.bury(RAISED) == BlameVerdict()
        harness.start()
        await late
        assert (context.replays, harness.requests.replayed) == (0, 0)

    run_scene(scene)


def test_what_comes_and_leaves_after_the_death_is_no_suspect() -> None:
    """As it would be without leaving."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start()
        harness.llm.die()
        late = harness.call("late")
        await harness.until_held(1)
        late.cancel()
        await asyncio.wait({late})
        assert harness.bury(RAISED) == BlameVerdict()

    run_scene(scene)


def test_a_stream_that_kills_is_tried_without_its_client() -> None:
    """It cannot be made again for its client, but it can be tried."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start(ScriptedLLM(answers=2)).hold()
        other = harness.call("other")
        await harness.llm.until_received(1)
        outputs = harness.requests.run("generate", {"prompt": "bad", "request_id": "bad"})
        harness.llm.release()
        await anext(outputs)
        harness.llm.hold()
        harness.llm.die()
        await asyncio.gather(other, anext(outputs, None), return_exceptions=True)
        harness.bury(named("bad", "gone"))
        assert not await harness.try_suspects(ScriptedLLM(poison="bad"))
        harness.bury(RAISED)
        with answered(QuarantinedError):
            await harness.call("bad")

    run_scene(scene)


def test_nobody_is_alone_in_a_step_with_a_request_that_nobody_knows() -> None:
    """It is tried like one of several."""

    async def scene(harness: ReplayHarness) -> None:
        (call,), verdict = await killed(harness, named("known", "unknown"), ["known"])
        assert verdict.explained == 0
        assert await harness.try_suspects()
        harness.requests.open()
        await call

    run_scene(scene)


def test_a_request_that_was_answered_is_no_neighbour_in_the_step_before() -> None:
    """What the engine gave back it has finished without harm."""
    before = Suspect("answered", 1, is_prefill=False, is_in_running_step=False)

    async def scene(harness: ReplayHarness) -> None:
        bad_suspect = Suspect("bad", 1, is_prefill=True)
        death = Death("core_exit", "", blames_requests=True, suspects=(bad_suspect, before))
        (bad,), verdict = await killed(harness, death, ["bad"], held=0)
        assert verdict.explained == 1
        with answered(SuspectedError):
            await bad

    run_scene(scene)


def test_an_explained_death_is_charged_to_the_key() -> None:
    """After three within an hour it has to wait until the oldest of them is an hour old."""
    clock = FakeClock()

    async def scene(harness: ReplayHarness) -> None:
        harness.requests = ReplayManager(PlainOutputs(), Suspicions(clock=clock))
        for number in range(3):
            assert not harness.requests.suspended_seconds("a")
            (call,), verdict = await killed(harness, RAISED, [f"bad {number}"], held=0, key="a")
            assert verdict.is_charged
            with answered(SuspectedError):
                await call
            clock.now_seconds += 600
        assert harness.requests.suspended_seconds("a") == 3600 - 3 * 600
        assert not harness.requests.suspended_seconds("b")
        clock.now_seconds += 3600 - 3 * 600
        assert not harness.requests.suspended_seconds("a")

    run_scene(scene)


@pytest.mark.parametrize("reason", ["engine_lost", "drained"])
def test_no_suspect_is_told_to_come_again_when_the_server_ends(reason: LossReason) -> None:
    """A router takes a 503 to the next server; what waits for nothing but an engine may go."""

    async def scene(harness: ReplayHarness) -> None:
        suspect, waiting = RequestContext(), RequestContext()
        harness.start().hold()
        requests = [harness.call(name, context=suspect) for name in ("a", "b")]
        await harness.llm.until_received(2)
        harness.bury(RAISED)
        late = harness.call("late", context=waiting)
        await harness.until_held(3)
        harness.requests.fail(ENDED, reason)
        for request in requests:
            with answered(SuspectedError):
                await request
        with answered(NotReadyError):
            await late
        assert suspect.may_be_retried is False
        assert waiting.may_be_retried is True
        assert harness.requests.lost["suspected"] == 2

    run_scene(scene)


def test_what_is_known_outlives_the_process(tmp_path: Path) -> None:
    """A container that is started again refuses the same requests."""
    files = SuspicionFiles(tmp_path / "state", "x")

    async def scene(harness: ReplayHarness) -> None:
        known = Suspicions(files)
        harness.requests = ReplayManager(PlainOutputs(), known)
        with known.learning():
            for _ in range(2):
                (call,), _ = await killed(harness, RAISED, ["bad"], held=0, key="a")
                await asyncio.wait({call})
            harness.requests.save()
        again = ReplayManager(PlainOutputs(), Suspicions(SuspicionFiles(tmp_path / "state", "x")))
        with answered(QuarantinedError):
            again.run("generate", {"prompt": "bad", "request_id": "r"})

    run_scene(scene)
    assert "bad" not in files.path.read_text()


def test_a_suspect_in_the_company_of_another_key_is_tried() -> None:
    """Its first death may have been the fault of the machine, and this one is the other's."""

    async def scene(harness: ReplayHarness) -> None:
        (call,), _ = await killed(harness, RAISED, ["popular"], held=0, key="victim")
        with answered(SuspectedError):
            await call
        harness.start().hold()
        requests = [
            harness.call(name, context=RequestContext(key=key))
            for name, key in (("popular#2", "victim"), ("killer", "attacker"))
        ]
        await harness.llm.until_received(2)
        assert harness.bury(RAISED) == BlameVerdict(has_suspects=True)
        await harness.until_held(2)
        assert not await harness.try_suspects(ScriptedLLM(poison="killer"))
        assert harness.bury(RAISED) == BlameVerdict(2, is_charged=True, has_suspects=True)
        with answered(QuarantinedError):
            await requests[1]
        assert await harness.try_suspects()
        harness.requests.open()
        await requests[0]

    run_scene(scene)


async def until_quarantined(requests: ReplayManager, prompt: str) -> None:
    """Return when requests with this prompt are refused."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not _is_quarantined(requests, prompt):  # noqa: ASYNC110 - the loop is all there is
            await asyncio.sleep(0.01)


def _is_quarantined(requests: ReplayManager, prompt: str) -> bool:
    try:
        requests.run("generate", {"prompt": prompt, "request_id": "again"})
    except AnsweredError as answer:
        return isinstance(answer.error, QuarantinedError)
    return False


def test_a_poison_does_not_meet_every_server(tmp_path: Path) -> None:
    """A router retries it at the next: the second death is the last, on all that share a state."""

    async def scene(_harness: ReplayHarness) -> None:
        suspicions = [Suspicions(SuspicionFiles(tmp_path, "x")) for _ in range(3)]
        servers = [
            ReplayHarness(ReplayManager(PlainOutputs(), known), ScriptedLLM())
            for known in suspicions
        ]
        with ExitStack() as stack:
            for known in suspicions:
                stack.enter_context(known.learning())
            for server in servers[:2]:  # neither waits for what the other one has found
                (call,), verdict = await killed(server, RAISED, ["bad#1"], held=0, key="a")
                assert verdict.explained == 1
                with answered(SuspectedError):
                    await call
            for server in servers[:2]:
                server.requests.save()
            for server in servers:
                await until_quarantined(server.requests, "bad#2")
            servers[2].start()
            assert await servers[2].call("good", context=RequestContext(key="a"))
            assert servers[2].llm.received == ["good"]

    run_scene(scene)


def test_a_suspicion_of_one_server_is_known_to_the_next(tmp_path: Path) -> None:
    """The second death quarantines it there, and three charge its key, wherever they were."""

    async def scene(_harness: ReplayHarness) -> None:
        suspicions = [Suspicions(SuspicionFiles(tmp_path, "x")) for _ in range(2)]
        first, second = (
            ReplayHarness(ReplayManager(PlainOutputs(), known), ScriptedLLM())
            for known in suspicions
        )
        with suspicions[1].learning():
            for prompt in ("bad", "worse"):
                (call,), _ = await killed(first, RAISED, [prompt], held=0, key="a")
                with answered(SuspectedError):
                    await call
            await asyncio.to_thread(suspicions[0].save)
            async with asyncio.timeout(DEADLINE_SECONDS):
                while suspicions[1].charged("a") < 2:  # noqa: ASYNC110 - another thread reads
                    await asyncio.sleep(0.01)
            (call,), _ = await killed(second, RAISED, ["bad"], held=0, key="a")
            with answered(QuarantinedError):
                await call
            assert second.requests.suspended_seconds("a")
            assert not first.requests.suspended_seconds("a")

    run_scene(scene)
