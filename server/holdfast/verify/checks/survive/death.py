"""Do answers outlive the engine? It is killed while many wait for theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryFile
from typing import IO, Any

from holdfast.verify.answers import MalformedError, dig, excerpt
from holdfast.verify.check import FROM_STANDARD, Check
from holdfast.verify.checks.asking import either
from holdfast.verify.checks.survive.asking import require_life
from holdfast.verify.course import course_of
from holdfast.verify.records import HoldfastFacts, equal_to
from holdfast.verify.survey import ask_facts, ask_holdfast
from holdfast.verify.target import PATIENT_SECONDS, Answer, NoAnswerError
from holdfast.verify.trial import InconclusiveError, SkippedError, Trial, UnexpectedStatusError
from holdfast.verify.waiting import is_limited, is_too_many, together

CLIENTS = 16
ANSWER_TOKENS = 192
_MIN_RUNNING = 4
"""Once the engine is at work on this many, the others wait or are about to be sent."""
_ROUNDS = 2
_COMMAND_SECONDS = 60.0
_MAX_SAID_BYTES = 16 * 1024
_WAIT_SECONDS = 30.0
_POLL_SECONDS = 0.05
_OK = 200

PathAndBody = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class CountedAnswer:
    """What an answer says; None stands for one that was lost."""

    content: str
    finish_reason: str
    tokens: int


async def death(trial: Trial) -> None:
    """Whatever was asked before the engine died is answered as if it had lived."""
    if not trial.options.kill_command:
        raise SkippedError(
            "--kill-command was not given",
            "give --kill-command, for example 'pkill -KILL -f ^VLLM::EngineCore', which kills "
            "every vLLM engine of this machine that you may signal",
        )
    asked = [
        either(trial, f"Story {number}: once upon a time", max_tokens=ANSWER_TOKENS)
        for number in range(CLIENTS)
    ]
    calm = [await _all(trial, asked) for _ in range(_ROUNDS)]
    before = await ask_facts(trial.target)
    try:
        waiting, disturbed = await _disturbed(trial, asked)
    except (InconclusiveError, MalformedError):
        # The command may have killed the engine all the same, which no later check may blame.
        with suppress(NoAnswerError, UnexpectedStatusError, InconclusiveError):
            await _note_death(trial, before)
        raise
    is_known_dead = await _note_death(trial, before)
    lost = sum(said is None for said in disturbed)
    trial.measure("answers that were waited for", sum(waiting))
    trial.measure("answers lost", lost, limit=equal_to(0))
    if not any(waiting):
        raise InconclusiveError("every answer had come before the engine was killed")
    if not lost and not is_known_dead:
        raise InconclusiveError("nothing shows that the command killed the engine")
    _compare(trial, calm, disturbed)


async def _disturbed(
    trial: Trial, asked: Sequence[PathAndBody]
) -> tuple[list[bool], list[CountedAnswer | None]]:
    """Which answers were waited for when the engine was killed, and what all of them say.

    Raises:
        InconclusiveError: the command could not be run, or says that it failed.
    """
    tasks = [asyncio.create_task(_one(trial, one)) for one in asked]
    try:
        await _until_running(trial, tasks)
        waiting = [not task.done() for task in tasks]
        await _kill(trial.options.kill_command)
        return waiting, await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _note_death(trial: Trial, before: HoldfastFacts | None) -> bool:
    """Note for later checks that this one killed Holdfast's engine; whether it is known to be dead.

    Raises:
        NoAnswerError: the server answers no more.
        UnexpectedStatusError: it answers with an error.
        InconclusiveError: it lets no request in.
    """
    # Here the engine was killed on purpose, and the next one may take its time.
    await require_life(trial, is_limited)
    after = await ask_holdfast(trial.target)
    is_known_dead = (
        before is not None and after is not None and after.generation > before.generation
    )
    course = await course_of(trial)
    course.told += [before] if before is not None else []
    course.killed += is_known_dead
    return is_known_dead


def _compare(
    trial: Trial,
    calm: Sequence[Sequence[CountedAnswer | None]],
    disturbed: Sequence[CountedAnswer | None],
) -> None:
    """Count the answers that changed, if chance cannot explain it.

    Raises:
        InconclusiveError: the server does not give the same greedy answers twice.
    """
    if calm[0] != calm[1]:
        raise InconclusiveError("the server does not give the same greedy answers twice")
    changed = sum(
        said is not None and said != was for said, was in zip(disturbed, calm[0], strict=True)
    )
    trial.measure("answers that changed", changed, limit=equal_to(0))


async def _all(trial: Trial, asked: Sequence[PathAndBody]) -> list[CountedAnswer | None]:
    return await together(*(_one(trial, one) for one in asked))


async def _one(trial: Trial, asked: PathAndBody) -> CountedAnswer | None:
    """What the answer says; None if it is lost, which is a fault."""
    path, body = asked
    try:
        ask = partial(trial.ask, path, body)
        # A server that says 503 has lost the answer, whenever it would take the next request.
        answer = await trial.admitted(ask, PATIENT_SECONDS, is_refused=is_too_many)
    except NoAnswerError as error:
        trial.blame(f"an answer was lost: {error}")
        return None
    if not trial.require(answer.status == _OK, f"an answer was lost: {answer.status}", answer):
        return None
    return _said(answer)


def _said(answer: Answer) -> CountedAnswer:
    tokens = dig(answer.usage(), "completion_tokens", kind=int)
    return CountedAnswer(answer.content(), answer.finish_reason(), tokens)


async def _until_running(trial: Trial, tasks: Sequence[asyncio.Task[CountedAnswer | None]]) -> None:
    """Wait until the engine is at work; of other servers it is only known that they have begun."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_WAIT_SECONDS):
            while not any(task.done() for task in tasks):
                told = await ask_holdfast(trial.target)
                if told is None or told.running >= _MIN_RUNNING:
                    return
                await asyncio.sleep(_POLL_SECONDS)


async def _kill(command: Sequence[str]) -> None:
    """Run the user's command, which may leave others running that write to the same place.

    Raises:
        InconclusiveError: it could not be run, or says that it failed.
    """
    with TemporaryFile() as output:  # a pipe would be waited for until the last of them has ended
        code = await _exit_code(command, output)
        output.seek(0)
        said = output.read(_MAX_SAID_BYTES).decode("utf-8", "replace")
    if code:
        raise InconclusiveError(f"the command ended with {code}: {excerpt(said)}")


async def _exit_code(command: Sequence[str], output: IO[bytes]) -> int:
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
        )
    except OSError as error:
        raise InconclusiveError(f"the command could not be run: {error}") from None
    try:
        async with asyncio.timeout(_COMMAND_SECONDS):
            return await process.wait()
    except TimeoutError:
        raise InconclusiveError(f"the command took over {_COMMAND_SECONDS:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


CHECKS = (
    Check(
        "death",
        "survive",
        death,
        "If the engine dies while 16 clients wait, each gets the answer it would have got.",
        profiles=FROM_STANDARD,
        deadline_seconds=3600.0,
        asked_for=lambda options: bool(options.kill_command),
    ),
)
