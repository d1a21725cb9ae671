"""The group `self`: each fault of a code path is found by the check that is meant for it, alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import get_args

import numpy as np
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from double_limits import AlternatingDouble
from grainy_double import GrainyDouble
from holdfast.verify.checks import self_agreement
from holdfast.verify.checks.oracle import recording
from holdfast.verify.checks.self_agreement import contexts, decodes
from holdfast.verify.checks.self_agreement.sequences import Sequences
from holdfast.verify.options import Options
from holdfast.verify.records import CheckResult, CheckStatus, Profile
from openai_double import Body, OpenAIDouble
from scoring_double import Context, ScoringDouble
from scoring_faults import PathFault, Peculiarity, SharedFault
from toy_scorer import BLOCK_TOKENS, LONG_TOKENS, MAX_TOKENS, Array, as_log_probs
from verified import not_passed, results

FOUND_BY: dict[PathFault, str] = {
    "a NaN row": "prefill",
    "decodes with positions off by one": "decode",
    "decodes with a quantized head": "decode",
    "the last block of a chunk dropped": "chunked",
    "a prefix that lacks its last block": "prefix",
    "two rows of a batch swapped": "full_batch",
    "an adapter that changes its neighbours": "beside_adapter",
    "penalties in the log-probs": "penalties",
    "penalties without effect": "penalties",
    "a grammar that rounds": "grammar",
    "a grammar without effect": "grammar",
    "wide lists that are rounded": "widths",
    "answers without log-probs that stray": "widths",
    "a weight scaled by 1.01 after a restart": "restart",
    "needles lost in the middle": "needles",
}

CHUNKED = [check for check in self_agreement.CHECKS if check.name == "chunked"]


def judged(peculiarity: Peculiarity) -> dict[str, CheckResult]:
    """Every check of the group, against a server that restarts its engine for an operator."""
    app = ScoringDouble(peculiarity, "of a client", "of an operator")
    return results(app, self_agreement.CHECKS)


def failed(made: dict[str, CheckResult]) -> set[str]:
    return {name for name, one in made.items() if one.status is CheckStatus.FAILED}


@pytest.mark.parametrize("trait", ["", "noise of 0.003 nat"])
def test_a_server_that_is_well_passes(trait: Peculiarity) -> None:
    """Also one that never gives the same log-prob twice: the noise is measured."""
    made = judged(trait)
    assert {name: (one.status, one.reason) for name, one in made.items() if one.reason} == {}
    limits = [n.limit for one in made.values() for n in one.numbers if n.unit == "nat" and n.limit]
    assert {limit.source for limit in limits} == {"A/A"}


def test_every_fault_has_its_check() -> None:
    """And every check a fault."""
    assert FOUND_BY.keys() == set(get_args(PathFault))
    assert set(FOUND_BY.values()) == {check.name for check in self_agreement.CHECKS}


@pytest.mark.parametrize("fault", FOUND_BY)
def test_a_fault_is_found_by_its_check(fault: PathFault) -> None:
    """No other one fails; those that build on what is broken are inconclusive."""
    made = judged(fault)
    assert failed(made) == {f"self.{FOUND_BY[fault]}"}
    others = set(not_passed(made).values()) - {CheckStatus.FAILED}
    assert others <= {CheckStatus.INCONCLUSIVE}


@pytest.mark.parametrize("fault", get_args(SharedFault))
def test_what_all_code_paths_share_is_not_found(fault: SharedFault) -> None:
    """It is the group oracle that finds it."""
    assert not_passed(judged(fault)) == {}


def test_the_longest_text_is_nearly_as_long_as_what_is_promised() -> None:
    """It leaves room for the answer, and is not longer."""
    only = [check for check in self_agreement.CHECKS if check.name == "needles"]
    (made,) = results(ScoringDouble(max_tokens=2000), only).values()
    (longest,) = [one.value for one in made.numbers if one.name == "longest prompt"]
    assert 0.9 * (2000 - 64) < longest <= 2000 - 64


def test_a_server_that_is_too_noisy_is_not_judged() -> None:
    """Nothing passes that was compared, and nothing fails."""
    made = judged("noise of 2 nats")
    assert {name for name, one in made.items() if one.status is CheckStatus.PASSED} == {
        "self.needles"
    }
    assert failed(made) == set()
    assert "too noisy" in made["self.decode"].reason


class AlternatingScorer(AlternatingDouble, ScoringDouble):
    """Scores as its like, and limits requests."""


def test_a_limit_of_requests_hides_nothing() -> None:
    """Each path is asked again: the adapter, the prefix cache and the restart are judged."""
    app = AlternatingScorer("", "of a client", "of an operator")
    app.limited = ("/v1/models", "/metrics", "/admin/restart")
    names = ("prefix", "beside_adapter", "restart")
    made = results(app, [check for check in self_agreement.CHECKS if check.name in names])
    assert (len(made), not_passed(made)) == (len(names), {})


class Adapted(ScoringDouble):
    """Lists nothing but its adapter, which is so the model that is verified."""

    async def _models(self, request: Request) -> Response:
        told = json.loads(bytes((await super()._models(request)).body))
        return JSONResponse({**told, "data": told["data"][1:]})


def test_an_adapter_is_not_compared_beside_itself() -> None:
    """As with `--model ADAPTER` on a server that has no other one."""
    only = [check for check in self_agreement.CHECKS if check.name == "beside_adapter"]
    (made,) = results(Adapted(), only).values()
    assert made.reason == "the server lists no LoRA adapter beside the verified model"


class Rounding(ScoringDouble):
    """Rounds logits to a step, and decodes with wrong positions behind 400 tokens."""

    def __init__(self, step: float) -> None:
        super().__init__("decodes with positions off by one")
        self._step = np.float32(step)

    def _noisy(self, rows: Array) -> Array:
        return as_log_probs(np.round(rows / self._step) * self._step)


def test_logits_that_are_rounded_to_whole_nats_are_not_judged() -> None:
    """The limits would be ten nats, which no fault exceeds."""
    only = [check for check in self_agreement.CHECKS if check.name in ("prefill", "decode")]
    made = results(Rounding(1.0), only)
    assert not_passed(made) == dict.fromkeys(made, CheckStatus.INCONCLUSIVE)
    assert "too noisy: the rounding of logits" in made["self.decode"].reason


def test_logits_of_bfloat16_above_32_are_warned_of() -> None:
    """Such a server may be well, and the warning says how little its checks find."""
    only = [check for check in self_agreement.CHECKS if check.name == "prefill"]
    (made,) = results(Rounding(0.25), only).values()
    assert made.status is CheckStatus.WARNED
    assert "less than 2.5 nat" in made.reason


class Forgetful(ScoringDouble):
    """Loses the last block of a prefix from the cache, where that is a long one."""

    def _scheduled(self, ids: Sequence[int], cached_tokens: int) -> Context:
        context = super()._scheduled(ids, cached_tokens)
        return replace(context, lost_end=cached_tokens) if cached_tokens > 2048 else context


def test_a_prefix_cache_that_is_wrong_only_behind_long_contexts_is_not_noise() -> None:
    """What grew in it would widen the limits of long contexts, and be recorded as their noise."""
    only = [check for check in self_agreement.CHECKS if check.name in ("chunked", "decode")]
    only += recording.CHECKS
    made = results(Forgetful(max_tokens=LONG_TOKENS), only, options=Options(records=True))
    assert not_passed(made) == dict.fromkeys(made, CheckStatus.INCONCLUSIVE)
    assert {one.reason.partition(":")[0] for one in made.values()} == {"too noisy"}


@pytest.mark.parametrize(
    ("peculiarity", "found"),
    [
        ("", {}),
        (
            "a prefix that lacks its last block",
            {"self.prefix": CheckStatus.FAILED, "self.chunked": CheckStatus.INCONCLUSIVE},
        ),
    ],
)
def test_long_prompts_in_the_cache_have_the_noise_of_long_contexts(
    peculiarity: Peculiarity, found: dict[str, CheckStatus], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it keeps no short ones; a fault of the cache is not taken for their noise."""
    monkeypatch.setattr(self_agreement.contexts, "_HITS_SECONDS", 1.0)
    only = [check for check in self_agreement.CHECKS if check.name in ("prefix", "chunked")]
    made = results(GrainyDouble(peculiarity, max_tokens=2600), only, "quick")
    assert not_passed(made) == found, made


class Edged(ScoringDouble):
    """Loses a block of a prompt from the cache that ends one token behind a block."""

    def _scheduled(self, ids: Sequence[int], cached_tokens: int) -> Context:
        context = super()._scheduled(ids, cached_tokens)
        is_edged = len(ids) % BLOCK_TOKENS == 1
        return replace(context, lost_end=cached_tokens) if is_edged else context


@pytest.mark.parametrize(
    ("profile", "prompts", "found"),
    [("quick", 2, {}), ("standard", 6, {"self.prefix": CheckStatus.FAILED})],
)
def test_prompts_in_the_cache_end_around_a_block(
    profile: Profile, prompts: int, found: dict[str, CheckStatus]
) -> None:
    """Those of `standard` do; `quick` has fewer."""
    only = [check for check in self_agreement.CHECKS if check.name == "prefix"]
    made = results(Edged(), only, profile)
    assert not_passed(made) == found, made
    assert {one.name: one.value for one in made["self.prefix"].numbers}["prompts"] == prompts


def test_without_a_prefix_cache_its_checks_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report says what to change; all others are made."""
    monkeypatch.setattr(self_agreement.contexts, "_HITS_SECONDS", 0.2)
    made = judged("a cache that is off")
    assert not_passed(made) == dict.fromkeys(("self.prefix", "self.chunked"), CheckStatus.SKIPPED)
    assert made["self.prefix"].remedy == "serve the model with --enable-prefix-caching"


def test_processed_log_probs_are_not_judged() -> None:
    """They are right to follow a penalty."""
    made = judged("processed log-probs")
    assert not_passed(made) == {"self.penalties": CheckStatus.SKIPPED}
    assert "--logprobs-mode" in made["self.penalties"].remedy


class PenaltyByDefault(ScoringDouble):
    """Has penalties of the model's own, which a request for log-probs must not leave to it."""

    async def _completion(self, request: Request) -> Response:
        body = await request.json()
        if body.get("logprobs") and "repetition_penalty" not in body:
            raise HTTPException(500, "the model's own penalties rule tokens out")
        return await super()._completion(request)


def test_log_probs_are_not_compared_under_penalties_of_the_model() -> None:
    """They are told before penalties, and so another token than the likeliest would be right."""
    checks = [check for check in self_agreement.CHECKS if check.name in ("widths", "penalties")]
    assert not_passed(results(PenaltyByDefault(), checks)) == {}


class Restarting(ScoringDouble):
    """Says the same to each who asks for a restart, and counts how often that was."""

    def __init__(self, status: int, api_key: str = "", admin_key: str = "") -> None:
        super().__init__(api_key=api_key, admin_key=admin_key)
        self._status = status
        self.asked = 0

    async def _restart(self, _request: Request) -> Response:
        self.asked += 1
        return JSONResponse({}, self._status)


@pytest.mark.parametrize(
    ("app", "reason", "asked"),
    [
        (Restarting(202, api_key="of an operator"), "no admin key was given", 0),
        (Restarting(403, admin_key="of nobody"), "for this key (HTTP 403)", 1),
    ],
    ids=("an admin key for the API", "another key"),
)
def test_without_the_admin_key_nothing_is_restarted(
    app: Restarting, reason: str, asked: int
) -> None:
    """The check is skipped, and says which key it needs: only the flag asks for a restart."""
    only = [check for check in self_agreement.CHECKS if check.name == "restart"]
    (made,) = results(app, only).values()
    assert (made.status, made.remedy) == (
        CheckStatus.SKIPPED,
        "give --admin-api-key-file a file with the admin key",
    )
    assert reason in made.reason
    assert app.asked == asked


def test_a_server_without_token_ids_is_skipped() -> None:
    """As OpenAI's own; but needles need only chats."""
    made = results(OpenAIDouble(), self_agreement.CHECKS)
    assert {one.status for one in made.values()} == {CheckStatus.SKIPPED}
    assert made["self.decode"].remedy == "serve the model with Holdfast or with vLLM"
    assert "short text" in made["self.needles"].reason


class Thinking(ScoringDouble):
    """Thinks before it answers: about a short text, and about longer ones."""

    def __init__(self, short_tokens: int, long_tokens: int) -> None:
        super().__init__(max_tokens=2000)
        self._thought_tokens = (short_tokens, long_tokens)

    async def _chat(self, request: Request) -> Response:
        told = json.loads(bytes((await super()._chat(request)).body))
        (choice,) = told["choices"]
        is_long = told["usage"]["prompt_tokens"] > 300
        message = {"reasoning": "Let me see.", **choice["message"]}
        if self._thought_tokens[is_long] >= (await request.json())["max_tokens"]:
            message["content"], choice["finish_reason"] = None, "length"
        return JSONResponse({**told, "choices": [{**choice, "message": message}]})


@pytest.mark.parametrize(
    ("short_tokens", "long_tokens", "status"),
    [
        (300, 300, CheckStatus.PASSED),
        (300, 600, CheckStatus.INCONCLUSIVE),
        (600, 600, CheckStatus.INCONCLUSIVE),
    ],
)
def test_a_model_that_thinks_has_room_and_is_not_judged_without_it(
    short_tokens: int, long_tokens: int, status: CheckStatus
) -> None:
    """What it would have found is not known."""
    only = [check for check in self_agreement.CHECKS if check.name == "needles"]
    (made,) = results(Thinking(short_tokens, long_tokens), only).values()
    assert made.status is status, made.reason


class Unparsed(Thinking):
    """Leaves its thoughts in the text, behind a tag or behind one that the template has."""

    def __init__(self, short_tokens: int, long_tokens: int, tag: str) -> None:
        super().__init__(short_tokens, long_tokens)
        self._tag = tag

    async def _chat(self, request: Request) -> Response:
        told = json.loads(bytes((await super()._chat(request)).body))
        message = told["choices"][0]["message"]
        thought, answer = message.pop("reasoning"), message["content"]
        end = "" if answer is None else f"</think>{answer}"
        message["content"] = f"{self._tag}{thought}{end}"
        return JSONResponse(told)


@pytest.mark.parametrize("tag", ["<think>", ""])
@pytest.mark.parametrize(
    ("short_tokens", "long_tokens", "status"),
    [(300, 300, CheckStatus.PASSED), (300, 600, CheckStatus.INCONCLUSIVE)],
)
def test_thoughts_that_are_left_in_the_text_have_room(
    tag: str, short_tokens: int, long_tokens: int, status: CheckStatus
) -> None:
    """The number stands behind them, and those about long texts may be cut."""
    only = [check for check in self_agreement.CHECKS if check.name == "needles"]
    (made,) = results(Unparsed(short_tokens, long_tokens, tag), only).values()
    assert made.status is status, made.reason


def test_single_thoughts_that_are_cut_are_warned_of() -> None:
    """The other texts are judged."""

    class Pondering(Thinking):
        async def _chat(self, request: Request) -> Response:
            text = str((await request.json())["messages"][-1]["content"])
            self._thought_tokens = (300, 600 if text.startswith("The secret number") else 300)
            return await super()._chat(request)

    only = [check for check in self_agreement.CHECKS if check.name == "needles"]
    (made,) = results(Pondering(300, 300), only).values()
    assert made.status is CheckStatus.WARNED
    assert "at 0% of" in made.reason


@pytest.mark.parametrize(
    ("profile", "decoded_behind", "prefilled", "together"),
    [
        ("quick", [17, 250], [1040, 2072], 8),
        ("standard", [15, 16, 17, 96, 250, 4090], [520, 1040, 2072, 3000, 4120, 8190, 8216], 16),
    ],
)
def test_a_profile_looks_at_so_many_lengths(
    profile: Profile, decoded_behind: list[int], prefilled: list[int], together: int
) -> None:
    """Where the context has room for all of them."""
    made = Sequences((), ((7,),), 10_000)
    assert decodes.prompt_lengths(profile, made) == decoded_behind
    assert contexts.context_lengths(profile, made) == prefilled
    assert self_agreement.batches.batch_size(profile, 0) == together


def test_a_decode_is_judged_at_the_lengths_of_the_profile() -> None:
    """Of the run's own: in `quick` behind two prompts."""
    only = [check for check in self_agreement.CHECKS if check.name == "decode"]
    (made,) = results(ScoringDouble(), only, "quick").values()
    assert [one.name for one in made.series] == ["behind 17 tokens", "behind 250 tokens"]


class Library(ScoringDouble):
    """Has room for the longest texts, finds every number, and remembers what it was shown."""

    def __init__(self) -> None:
        super().__init__(max_tokens=300_000)
        self.texts = dict[int, set[str]]()
        """Those with a number to find, by how many lines they have."""

    async def _chat(self, request: Request) -> Response:
        text = str((await request.json())["messages"][-1]["content"])
        if "secret number" in text:
            self.texts.setdefault(text.count("\n"), set()).add(text)
        message = {"role": "assistant", "content": "70413"}
        usage = {"prompt_tokens": len(text) // 4, "completion_tokens": 2, "total_tokens": 2}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return JSONResponse({"choices": [choice], "usage": usage})


@pytest.mark.parametrize(
    ("profile", "lengths"),
    [
        ("standard", [512, 2048, 8192]),
        ("full", [512, 2048, 8192, 16384, 32768, 65536, 131072, 262144]),
    ],
)
def test_needles_are_hidden_at_15_depths_of_each_length(
    profile: Profile, lengths: list[int]
) -> None:
    """Each depth of a length is another text; the last lines are told and not judged."""
    app = Library()
    only = [check for check in self_agreement.CHECKS if check.name == "needles"]
    (made,) = results(app, only, profile).values()
    assert made.status is CheckStatus.PASSED, made.reason
    hidden = {max(map(len, one)) // 4: len(one) for one in app.texts.values() if len(one) > 1}
    assert [*hidden.values()] == [15] * len(lengths)
    for found, length in zip(hidden, lengths, strict=True):
        assert 0.9 * length < found <= length


@pytest.mark.parametrize(
    ("longest", "decoded_behind", "prefilled"),
    [(300_000, 299_976, 299_999), (8192, 8168, 8191), (10_000_000, 524_288, 524_288)],
)
def test_full_looks_at_the_whole_context(longest: int, decoded_behind: int, prefilled: int) -> None:
    """It does not end where the powers of two do, and yet within hours."""
    made = Sequences((), ((7,),), longest)
    assert decodes.prompt_lengths("full", made)[-1] == decoded_behind
    assert contexts.context_lengths("full", made)[-1] == prefilled


@pytest.mark.parametrize(
    ("profile", "longest", "step_tokens", "added"),
    [
        ("quick", 32_768, 8192, [8216]),
        ("quick", 32_768, 16_384, [16_408]),
        ("quick", 65_536, 32_768, []),
        ("standard", 65_536, 16_384, [16_408]),
        ("standard", 16_390, 16_384, [16_389]),
        ("standard", 16_384, 16_384, []),
        ("full", 1_000_000, 200_000, []),
        ("quick", 32_768, 2048, []),
        ("quick", 32_768, None, []),
    ],
)
def test_one_prompt_is_longer_than_an_engine_step(
    profile: Profile, longest: int, step_tokens: int | None, added: list[int]
) -> None:
    """If the step is known, the context has room, and the profile can afford it."""
    made = Sequences((), ((7,),), longest)
    own = contexts.context_lengths(profile, made)
    assert contexts.context_lengths(profile, made, step_tokens=step_tokens) == [*own, *added]


class Bounded(ScoringDouble):
    """Says how much an engine step takes."""

    def __init__(self, tokens: int = 0, seqs: int = 0, *, max_tokens: int = MAX_TOKENS) -> None:
        super().__init__(max_tokens=max_tokens)
        self.configuration = replace(
            self.configuration, max_num_batched_tokens=tokens, max_num_seqs=seqs
        )

    async def _statusz(self, request: Request) -> Response:
        known = json.loads(bytes((await super()._statusz(request)).body))
        return JSONResponse({**known, "configuration": asdict(self.configuration)})


@pytest.mark.parametrize(("profile", "sequences"), [("full", 66), ("quick", 8)])
def test_a_full_batch_is_one_of_the_server(profile: Profile, sequences: int) -> None:
    """In `full`, as many sequences decode together as the server lets run at a time."""
    only = [check for check in self_agreement.CHECKS if check.name == "full_batch"]
    (made,) = results(Bounded(seqs=66), only, profile).values()
    assert made.status is CheckStatus.PASSED, made.reason
    assert {one.name: one.value for one in made.numbers}["sequences"] == sequences


@pytest.mark.parametrize(("max_num_seqs", "sequences"), [(0, 64), (4, 64), (128, 128), (1024, 256)])
def test_the_size_of_a_full_batch_is_bounded(max_num_seqs: int, sequences: int) -> None:
    """More than a few hundred would take too long; fewer than 64 show less."""
    assert self_agreement.batches.batch_size("full", max_num_seqs) == sequences


@pytest.mark.parametrize(
    ("step_tokens", "profile", "max_tokens", "status", "numbers"),
    [
        (0, "standard", MAX_TOKENS, CheckStatus.PASSED, (0, None, 639)),
        (400, "standard", MAX_TOKENS, CheckStatus.PASSED, (2, 400, 639)),
        (2100, "quick", 2600, CheckStatus.PASSED, (1, 2100, 2124)),
        (2048, "standard", MAX_TOKENS, CheckStatus.PASSED, (0, 2048, 639)),
        (2200, "quick", 2600, CheckStatus.WARNED, (0, 2200, 2072)),
    ],
)
def test_a_run_without_chunks_is_warned_of(
    step_tokens: int,
    profile: Profile,
    max_tokens: int,
    status: CheckStatus,
    numbers: tuple[int, int | None, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a client could send a prompt that is longer than a step."""
    monkeypatch.setitem(contexts._LONGEST_STEPS, "quick", 2100)
    (made,) = results(Bounded(step_tokens, max_tokens=max_tokens), CHUNKED, profile).values()
    assert made.status is status, made.reason
    told = {one.name: one.value for one in made.numbers}
    names = ("prompts known to be longer than an engine step", "engine step", "longest prompt")
    assert tuple(told.get(name) for name in names) == numbers
    assert ("none came in chunks" in made.reason) == (status is CheckStatus.WARNED)


class Unclosed(ScoringDouble):
    """Has a line with half of its labels before what the prefix cache has spared."""

    async def _metrics(self, request: Request) -> Response:
        page = bytes((await super()._metrics(request)).body).decode()
        bare = page.replace('{engine="0",model_name="double"}', "")
        return PlainTextResponse(f"vllm:prefix_cache_hits{{\n{bare}other{{}} 7.0\n")


def test_a_brace_that_is_not_closed_hides_no_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with its line."""
    monkeypatch.setattr(self_agreement.contexts, "_HITS_SECONDS", 1.0)
    only = [check for check in self_agreement.CHECKS if check.name == "prefix"]
    assert not_passed(results(Unclosed(), only)) == {}


class Strict(ScoringDouble):
    """Refuses what does not fit into its context, and has blocks of many tokens in its cache."""

    def __init__(self, max_tokens: int, block_tokens: int = 0) -> None:
        super().__init__(api_key="of a client", admin_key="of an operator", max_tokens=max_tokens)
        self._block_tokens = block_tokens

    async def _completed(self, body: Body, ids: list[int]) -> Body:
        if len(ids) + body["max_tokens"] > self.max_model_len:
            raise HTTPException(400, "the prompt is too long")
        return await super()._completed(body, ids)

    def _cached_tokens(self, body: Body, ids: Sequence[int]) -> int:
        return super()._cached_tokens(body, ids) if len(ids) > self._block_tokens else 0


@pytest.mark.parametrize(
    ("max_tokens", "block_tokens", "profile", "skipped"),
    [
        (320, 0, "full", ["self.chunked"]),
        (400, 0, "quick", []),
        (1024, 544, "quick", ["self.chunked"]),
    ],
)
def test_a_short_context_is_not_exceeded(
    max_tokens: int,
    block_tokens: int,
    profile: Profile,
    skipped: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts are cut to it, also those of a baseline; what has no room in it is skipped."""
    monkeypatch.setattr(self_agreement.contexts, "_HITS_SECONDS", 0.5)
    checks = [check for check in self_agreement.CHECKS if check.name != "needles"]
    checks += recording.CHECKS
    made = results(Strict(max_tokens, block_tokens), checks, profile, Options(records=True))
    assert not_passed(made) == dict.fromkeys(skipped, CheckStatus.SKIPPED), made
