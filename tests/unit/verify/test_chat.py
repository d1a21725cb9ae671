"""The group `chat`: each defect of a model is found by the check that is meant for it, alone."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from starlette.responses import JSONResponse, Response

from double_defects import Defect
from double_limits import SlowDouble
from double_model import Generated
from holdfast.verify.baseline import Baseline, Score
from holdfast.verify.check import Check
from holdfast.verify.checks import chat
from holdfast.verify.checks.chat import matrix
from holdfast.verify.checks.chat.judges import broken_characters, loop, stray_scripts
from holdfast.verify.checks.chat.matrix import prompts
from holdfast.verify.options import Options
from holdfast.verify.records import CheckStatus
from openai_double import Body, OpenAIDouble
from unseeded_double import Unseeded
from verified import hurry, not_passed, results

FOUND_BY: dict[Defect, str] = {
    "no sums": "arithmetic",
    "no such capital": "capital",
    "no greeting": "greeting",
    "seeds without effect": "seeds",
    "chats that loop": "matrix",
    "chats that stray into another script": "matrix",
    "chats that only think": "matrix",
}
MATRIX = [check for check in chat.CHECKS if check.name == "matrix"]
SEEDS = [check for check in chat.CHECKS if check.name == "seeds"]
SMOKE = [check for check in chat.CHECKS if check.name in {"arithmetic", "capital", "greeting"}]
EXPECTED = "answers with what was asked for"


def test_a_model_that_is_well_passes() -> None:
    """Nothing is blamed, warned of or skipped."""
    made = results(OpenAIDouble(), chat.CHECKS)
    assert {name: (one.status, one.reason) for name, one in made.items() if one.reason} == {}


@pytest.mark.parametrize("defect", FOUND_BY)
def test_a_defect_is_found_by_its_check(defect: Defect) -> None:
    """No other one fails."""
    made = results(OpenAIDouble(defect), chat.CHECKS)
    assert not_passed(made) == {f"chat.{FOUND_BY[defect]}": CheckStatus.FAILED}


def test_a_greedy_answer_that_changes_is_warned_of() -> None:
    """No other check notices, because batching on a GPU can do the same."""
    made = results(OpenAIDouble("a greedy story that changes"), chat.CHECKS)
    assert not_passed(made) == {"chat.greedy": CheckStatus.WARNED}


@pytest.mark.parametrize(
    ("owner", "gone", "status"),
    [
        ("vllm", (), CheckStatus.FAILED),
        ("vllm", ("/version",), CheckStatus.WARNED),
        ("tensorrt_llm", (), CheckStatus.WARNED),
        ("sglang", ("/version",), CheckStatus.WARNED),
    ],
)
def test_a_seed_is_a_promise_of_vllm_alone(
    owner: str, gone: tuple[str, ...], status: CheckStatus
) -> None:
    """OpenAI's API promises no more than best effort; others also tell a version."""
    app = OpenAIDouble("seeds without effect").owned_by(owner)
    (made,) = results(app.without(*gone), SEEDS).values()
    assert made.status is status
    said = made.faults or made.warnings
    assert said[0].what.startswith("two answers under one seed differ")


class Fingerprinting(OpenAIDouble):
    """Tells of another backend with each answer."""

    def _answer(self, body: Body, prompt: str | list[int], *, is_chat: bool) -> Response:
        told = json.loads(bytes(super()._answer(body, prompt, is_chat=is_chat).body))
        return JSONResponse({**told, "system_fingerprint": told["id"]})


def test_a_fingerprint_that_changes_is_told() -> None:
    """By it a client knows that a seed has no meaning any more."""
    (made,) = results(Fingerprinting("seeds without effect").owned_by("openai"), SEEDS).values()
    assert made.status is CheckStatus.WARNED
    assert made.reason.endswith("and `system_fingerprint` changed")


@pytest.mark.parametrize("status", [400, 422])
def test_a_server_that_refuses_seeds_is_skipped(status: int) -> None:
    """In its words."""
    (made,) = results(Unseeded().with_status(status).without("/statusz"), SEEDS).values()
    assert made.status is CheckStatus.SKIPPED
    assert made.reason.startswith("the server refuses `seed`: ")
    assert "seed is not supported" in made.reason


def test_seeds_of_chats_are_judged_where_completions_refuse_them() -> None:
    """Chats are what the check asks for."""
    (made,) = results(Unseeded().only_at("/v1/completions").without("/statusz"), SEEDS).values()
    assert made.status is CheckStatus.PASSED, made.reason


@pytest.mark.parametrize(
    "app",
    [
        Unseeded(),
        Unseeded().with_status(500).without("/statusz"),
        Unseeded().for_field("temperature").without("/statusz"),
    ],
    ids=("Holdfast", "a crash", "no sampled answer"),
)
def test_a_seed_is_refused_only_by_a_clear_4xx(app: OpenAIDouble) -> None:
    """Holdfast takes seeds, and what is refused without a seed too is not the seed."""
    (made,) = results(app, SEEDS).values()
    assert made.status is CheckStatus.FAILED


def test_rounds_do_without_seeds_where_they_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later rounds of the matrix are sampled all the same."""
    monkeypatch.setitem(matrix._ROUNDS, "standard", 2)
    (made,) = results(Unseeded().without("/statusz"), MATRIX).values()
    assert made.status is CheckStatus.PASSED, made.reason
    assert {one.name: one.value for one in made.numbers}["answers"] == 24


@pytest.mark.parametrize(
    ("value", "status"), [(100.0, CheckStatus.FAILED), (20.0, CheckStatus.PASSED)]
)
def test_a_model_that_knows_less_than_was_recorded_fails(value: float, status: CheckStatus) -> None:
    """The double knows none of the answers; one of five is within the error of five questions."""
    baseline = Baseline(scores={EXPECTED: Score(value, 10)})
    (made,) = results(OpenAIDouble(), MATRIX, options=Options(baseline)).values()
    assert made.status is status
    (limit,) = (number.limit for number in made.numbers if number.name == EXPECTED)
    assert limit is not None
    assert limit.source == "baseline"


def test_an_answer_without_expected_words_is_not_counted_as_right() -> None:
    """Five of the six prompts of `standard` expect words, in two modes of thinking."""
    (made,) = results(OpenAIDouble(), MATRIX).values()
    (share,) = (number for number in made.numbers if number.name == EXPECTED)
    assert (share.value, share.of) == (0, 10)


def test_every_mode_of_thinking_is_asked() -> None:
    """A mode is one that changes the prompt; the matrix asks each prompt in each."""
    (made,) = results(OpenAIDouble(), MATRIX).values()
    numbers = {number.name: number.value for number in made.numbers}
    assert numbers["modes of thinking"] == 2
    assert numbers["answers"] == 12


def test_full_asks_every_prompt_three_times_in_each_mode() -> None:
    """Once as a greedy answer, and twice as sampled ones."""
    (made,) = results(OpenAIDouble(), MATRIX, "full").values()
    assert made.status is CheckStatus.PASSED, made.reason
    assert {number.name: number.value for number in made.numbers}["answers"] == 3 * 35 * 2


def test_the_prompts_are_those_of_the_profiles() -> None:
    """Six of `standard`, thirty-five of `full`, each with a name of its own."""
    assert len({one.name for one in prompts()}) == len(prompts()) == 35
    assert [one.is_standard for one in prompts()].count(True) == 6


@pytest.mark.parametrize(
    ("text", "repeated"),
    [
        ("and then the lamp went out, " * 6, "and then the lamp went out,"),
        ("So: " + "no " * 40, "no"),
        ("灯塔很高。" * 12, "灯塔很高。"),
        ("The lamp went out. The lamp went on. The lamp went out.", ""),
        ("| a | b |\n" + "-" * 200, ""),
        ("ha ha ha ha ha ha", ""),
        ("", ""),
    ],
)
def test_a_loop_is_found(text: str, repeated: str) -> None:
    """Over a line of it; rules of tables and short emphasis are none."""
    assert loop(text) == repeated


SENTENCE = (
    "The keeper climbed the stairs again, trimmed the wick, wrote the hour and the wind into the "
    "book, and went down to the harbour, where nobody had seen the ship. "
)
PARAGRAPH = f"{SENTENCE}{'The lamp burned on. '.upper()}{SENTENCE[:-2].lower()}, so he waited."
TABLE = "".join(
    f"| {number:02} | Aurora | salt, tar and hemp | from the northern harbour to the south | "
    f"{'on time' if number % 5 else 'late'} |\n"
    for number in range(90)
)


@pytest.mark.parametrize("before", ["", "So: ", "One night it rained.\n"])
@pytest.mark.parametrize("after", ["", "The keep"])
@pytest.mark.parametrize("unit", [SENTENCE[:82], SENTENCE, f"{PARAGRAPH[:299]}\n"])
def test_a_loop_of_a_long_sentence_is_found(before: str, unit: str, after: str) -> None:
    """Wherever it begins; said five times, it may be a refrain."""
    found = loop(f"{before}{unit * 6}{after}")
    assert len(found) > 80
    assert found in unit * 2
    assert loop(f"{before}{unit * 5}") == ""


@pytest.mark.parametrize(
    "text",
    [
        TABLE,
        SENTENCE * 5,
        f"|{'-' * 90}|{'-' * 90}|\n" * 12,
        "\n".join(f"{number}. {SENTENCE}" for number in range(60)),
        "".join(
            f"    if case == {number}:\n        return handle({number})\n" for number in range(99)
        ),
    ],
)
def test_a_text_of_like_lines_is_not_a_loop(text: str) -> None:
    """A table, a refrain, rules, a list or code."""
    assert loop(text) == ""


@pytest.mark.parametrize(
    "text",
    [
        " ".join(f"step {number % 7} of {number}" for number in range(2000)),
        "".join(SENTENCE * 5 + f"{number} " for number in range(40)),
        "-" * 20_000,
        f"{'-' * 500}|" * 40,
    ],
)
def test_a_loop_is_found_in_time(text: str) -> None:
    """Also where it nearly is one, over and over."""
    started_seconds = time.process_time()
    assert loop(text) == ""
    assert time.process_time() - started_seconds < 5.0


def test_only_the_end_of_a_very_long_answer_is_judged() -> None:
    """A model that loops goes on until it is cut; megabytes would take minutes."""
    fine = " ".join(f"step {number}" for number in range(1_000_000))
    assert loop(f"{'no ' * 40}{fine}") == ""
    assert loop(f"{fine} {'no ' * 40}") == "no"
    assert stray_scripts(f"{'灯塔' * 40}{fine}") == {}
    assert stray_scripts(f"{fine}{'灯塔' * 400}") == {"CJK": 800}


@pytest.mark.parametrize(
    ("text", "allowed", "stray"),
    [
        ("The naïve Δ is 0.5 µm.", frozenset(), {}),
        ("The tower 的灯 shines", frozenset(), {"CJK": 2}),
        ("The tower 的灯 shines", frozenset({"CJK"}), {}),
        ("Спасибо!", frozenset({"CYRILLIC"}), {}),
        ("Спасибо!", frozenset(), {"CYRILLIC": 7}),
    ],
)
def test_a_stray_script_is_found(text: str, allowed: frozenset[str], stray: dict[str, int]) -> None:
    """What the prompt asks for is none."""
    assert stray_scripts(text, allowed) == stray


def test_broken_characters_are_counted() -> None:
    """A cut one at the end is not the fault of the model."""
    assert broken_characters("a\ufffdb\ufffd") == 1


class Thinking(OpenAIDouble):
    """Thinks until it is cut, or until it ends without an answer."""

    def __init__(self, finish_reason: str) -> None:
        super().__init__()
        self._finish_reason = finish_reason

    def _generate(self, body: Body, prompt: str) -> Generated:
        return replace(super()._generate(body, prompt), finish_reason=self._finish_reason)

    def _thought(self, made: Generated, _body: Body) -> Body:
        return {"content": None, "reasoning": made.text}


@pytest.mark.parametrize(
    ("finish_reason", "status"),
    [("length", CheckStatus.INCONCLUSIVE), ("stop", CheckStatus.FAILED)],
)
def test_a_model_that_is_cut_while_it_thinks_is_not_judged(
    finish_reason: str, status: CheckStatus
) -> None:
    """It might have answered; one that ends without an answer gives none."""
    made = results(Thinking(finish_reason), SMOKE)
    assert {one.status for one in made.values()} == {status}


class Hiding(Thinking):
    """Counts its thoughts, and does not tell them."""

    def _thought(self, _made: Generated, _body: Body) -> Body:
        return {"content": ""}

    def _answer(self, body: Body, prompt: str | list[int], *, is_chat: bool) -> Response:
        answer = super()._answer(body, prompt, is_chat=is_chat)
        told = json.loads(bytes(answer.body))
        told["usage"]["completion_tokens_details"] = {"reasoning_tokens": 64}
        return JSONResponse(told)


class Unparsed(Thinking):
    """Leaves its thoughts in the text."""

    def _thought(self, made: Generated, _body: Body) -> Body:
        return {"content": f"<think>\nWell: {made.text[::-1]}"}


@pytest.mark.parametrize("kind", [Hiding, Unparsed])
def test_thoughts_that_a_server_hides_or_leaves_in_the_text_are_not_an_answer(
    kind: type[Thinking],
) -> None:
    """What `max_tokens` has cut is not judged."""
    made = results(kind("length"), [*SMOKE, *MATRIX])
    smoke = {f"chat.{check.name}": CheckStatus.INCONCLUSIVE for check in SMOKE}
    assert not_passed(made) == smoke
    ended = results(kind("stop"), SMOKE)
    assert set(not_passed(ended).values()) == {CheckStatus.FAILED}


@pytest.mark.parametrize("check", [*SMOKE, *MATRIX], ids=lambda check: check.name)
def test_a_slow_server_is_waited_for(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that thinks first may write hundreds of tokens."""
    hurry(monkeypatch)
    assert not_passed(results(SlowDouble(), [check])) == {}


NONSENSE = {
    "17 + 25": "142",
    "capital of France": "A Parisian one.",
    "Hello": "This is the history of the shipyard.",
}


def test_parts_of_words_are_no_answer() -> None:
    """Nonsense has many of them."""
    made = results(OpenAIDouble(known=NONSENSE), SMOKE)
    assert {one.status for one in made.values()} == {CheckStatus.FAILED}
