"""vLLM's own books of an answer that goes on in another engine are those of one engine."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason, detokenizer
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics.stats import IterationStats, PrefillStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker import gpu_model_runner

from holdfast.demo.tokenizer import write_tokenizer
from holdfast.engine.outputs import VllmOutputs
from holdfast.engine.proxy import EngineProxy
from holdfast.engine.requests.continuation import (
    ContinuedPrompt,
    going_on,
    hand_over,
    restore,
    sent_answer,
)
from holdfast.engine.requests.request import SentAnswer
from holdfast.patches.continued import SENT_TOKENS, keep_sent_tokens, resume_answers

NAME = "cmpl-1"
PROMPT = list(b"Say: ")
TEXT = "Zürich grüßt 東京 🎌, to stop here"
TOKENS = list(TEXT.encode())
"""A token of the demo's tokenizer is a byte, so that characters lie over each seam."""
CACHED_TOKENS = 3
WEIGHTS = "default"
"""What EngineCore calls them until it is told otherwise."""
DELTA = RequestOutputKind.DELTA
OUTPUTS = VllmOutputs()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """That of the demo model."""
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, 2048)
    return AutoTokenizer.from_pretrained(directory)


def a_request(parameters: SamplingParams, prompt: Sequence[int] = PROMPT) -> EngineCoreRequest:
    """A request as vLLM's input processor makes it."""
    nothing: Any = dict.fromkeys(
        ("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank")
    )
    return EngineCoreRequest(
        request_id=NAME,
        external_req_id=NAME,
        prompt_token_ids=list(prompt),
        sampling_params=parameters,
        arrival_time=1.0,
        **nothing,
    )


@dataclass
class Answer:
    """What one or several engines yielded for a request."""

    outputs: list[Any] = field(default_factory=list)
    sent: SentAnswer = field(default_factory=SentAnswer)

    @property
    def seen(self) -> dict[str, Any]:
        """All that vLLM's routes make an answer of."""
        parts = [output.outputs[0] for output in self.outputs]
        return {
            "text": "".join(part.text for part in parts),
            "tokens": [token for part in parts for token in part.token_ids],
            "logprobs": [
                [(token, one.logprob, one.rank, one.decoded_token) for token, one in place.items()]
                for part in parts
                for place in part.logprobs or ()
            ],
            "cumulative": parts[-1].cumulative_logprob,
            "ends": [
                (part.finish_reason, part.stop_reason) for part in parts if part.finish_reason
            ],
            "weights": parts[-1].weight_versions,
            "prompts": {tuple(output.prompt_token_ids) for output in self.outputs},
            "cached": {output.num_cached_tokens for output in self.outputs},
            "prompt logprobs": [
                place for one in self.outputs for place in one.prompt_logprobs or ()
            ],
        }


class Books:
    """The front end of one engine, which is fed tokens as if the engine had made them."""

    def __init__(
        self, tokenizer: Any, parameters: SamplingParams, tokens: Sequence[int] = TOKENS
    ) -> None:
        self.tokens = tokens
        self.processor = OutputProcessor(tokenizer, log_stats=True)
        self.queue = RequestOutputCollector(DELTA, NAME)
        self.processor.add_request(a_request(parameters), None, queue=self.queue)
        self.state = self.processor.request_states[NAME]
        self.stats = IterationStats()
        self._has_logprobs = parameters.logprobs is not None

    def feed(self, answer: Answer, begin: int = 0, end: int | None = None) -> None:
        """Process one token after the other, and take what is yielded."""
        for place in range(begin, end or len(self.tokens)):
            token = self.tokens[place]
            made = EngineCoreOutput(NAME, [token])
            if self._has_logprobs:
                alternatives, values = [[token, 33]], [[-0.5 - token / 256, -9.0]]
                made.new_logprobs = LogprobsLists(
                    np.array(alternatives), np.array(values), np.array([1])
                )
            if not place:
                made.prefill_stats = PrefillStats(num_cached_tokens=CACHED_TOKENS)
            if place == len(self.tokens) - 1:
                made.finish_reason = FinishReason.LENGTH
            self.processor.process_outputs([made], 1.0, self.stats, weight_version=WEIGHTS)
            if (output := self.queue.get_nowait()) is not None:
                answer.outputs.append(output)
                OUTPUTS.add_sent(answer.sent, output)


def answered(
    tokenizer: Any, parameters: SamplingParams, *seams: int, tokens: Sequence[int] = TOKENS
) -> Answer:
    """The answer of as many engines as there are seams, and one more."""
    answer = Answer()
    for end in (*seams, None):
        books = Books(tokenizer, parameters, tokens)
        if answer.sent.token_ids:
            restore(books.state, answer.sent)
        books.feed(answer, len(answer.sent.token_ids), end)
    return answer


PARAMETERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop string": {"stop": ["stop", "never"]},
    "kept stop string": {"stop": ["to st"], "include_stop_str_in_output": True},
    "late stop string": {"stop": ["ü", "here"], "min_tokens": 20},
    "log-probs": {"logprobs": 1},
    "flat log-probs": {"logprobs": 1, "flat_logprobs": True},
    "special tokens": {"skip_special_tokens": False, "spaces_between_special_tokens": False},
    "prompt log-probs": {"prompt_logprobs": 1},
    "few outputs": {"stream_interval": 3, "logprobs": 1},
}


@pytest.mark.parametrize("is_fast", [True, False], ids=["fast", "slow"])
@pytest.mark.parametrize("name", PARAMETERS)
def test_no_seam_is_seen(
    tokenizer: Any, name: str, monkeypatch: pytest.MonkeyPatch, *, is_fast: bool
) -> None:
    """Wherever it is: in a character, in a stop string, after the first token, before the last."""
    monkeypatch.setattr(detokenizer, "uses_fast_detokenizer", lambda _: is_fast)
    parameters = SamplingParams(output_kind=DELTA, max_tokens=99, **PARAMETERS[name])
    whole = answered(tokenizer, parameters)
    assert whole.seen["ends"]
    for seam in range(1, len(whole.seen["tokens"])):
        assert answered(tokenizer, parameters, seam).seen == whole.seen, seam


def test_an_answer_may_go_on_more_than_once(tokenizer: Any) -> None:
    """Each engine gets all that was sent, by whichever engine."""
    parameters = SamplingParams(output_kind=DELTA, stop=["here"], logprobs=1)
    whole = answered(tokenizer, parameters)
    assert answered(tokenizer, parameters, 2, 3, 9, 20).seen == whole.seen


THOUGHT, SAID = "Zürich? 東京!", "It is 東京 🎌."
END_OF_THOUGHT = "</think>"
REASONING_PARSERS = ("deepseek_r1", "qwen3")
"""One of each kind that vLLM has: the second is built on its parser engine."""


@pytest.fixture(scope="module")
def thinking_tokenizer(tokenizer: Any) -> Any:
    """The demo's, with tokens around thoughts, as models have them that reason."""
    found = copy.deepcopy(tokenizer)
    found.add_tokens(["<think>", END_OF_THOUGHT])
    return found


def read_by_client(
    answer: Answer, tokenizer: Any, *, reasoning: str | None = None, tool: str | None = None
) -> tuple[str, str, str]:
    """What was said, thought and called, as vLLM's chat route streams it.

    The parsers of a request outlive its engine.
    """
    kind: Any = ParserManager.get_parser(tool, reasoning, tool is not None, tokenizer=tokenizer)
    request = ChatCompletionRequest(
        messages=[{"role": "user", "content": "Say"}], tools=[TOOL] if tool else None
    )
    parser = kind(tokenizer, request.tools, chat_template_kwargs=None, model_config=None)
    deltas = [
        parser.parse_delta(
            delta_text=part.text,
            delta_token_ids=list(part.token_ids),
            request=request,
            prompt_token_ids=output.prompt_token_ids,
            finished=part.finish_reason is not None,
        )
        for output in answer.outputs
        for part in output.outputs
    ]
    found = [delta for delta in deltas if delta is not None]
    functions = [call.function for delta in found for call in delta.tool_calls or ()]
    return (
        "".join(delta.content or "" for delta in found),
        "".join(delta.reasoning or "" for delta in found),
        "".join((one.name or "") + (one.arguments or "") for one in functions if one),
    )


@pytest.mark.parametrize("parser_name", REASONING_PARSERS)
def test_thoughts_end_where_they_would_have(thinking_tokenizer: Any, parser_name: str) -> None:
    """Wherever the seam is: in a thought, before and after its end, and in what is said then."""
    end = thinking_tokenizer.convert_tokens_to_ids(END_OF_THOUGHT)
    tokens = [*THOUGHT.encode(), end, *SAID.encode()]
    parameters = SamplingParams(output_kind=DELTA, max_tokens=99)
    for seams in ((), *((seam,) for seam in range(1, len(tokens)))):
        answer = answered(thinking_tokenizer, parameters, *seams, tokens=tokens)
        read = read_by_client(answer, thinking_tokenizer, reasoning=parser_name)
        assert read == (SAID, THOUGHT, ""), seams


CALLS = {
    "hermes": '<tool_call>\n{"name": "hold", "arguments": {"text": "Zürich"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=hold>\n<parameter=text>\nZürich\n</parameter>\n"
    "</function>\n</tool_call>",
}
"""A call for one parser of each kind; the second is built on vLLM's parser engine."""
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "hold", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def calling_tokenizer(tokenizer: Any) -> Any:
    """The demo's, with tokens around tool calls."""
    found = copy.deepcopy(tokenizer)
    found.add_tokens(["<tool_call>", "</tool_call>"])
    return found


@pytest.mark.parametrize("parser_name", CALLS)
def test_a_tool_call_is_read_as_it_would_have_been(
    calling_tokenizer: Any, parser_name: str
) -> None:
    """Wherever the seam is: in what is said before, in the name, in a character of an argument."""
    tokens = calling_tokenizer.encode(SAID + CALLS[parser_name], add_special_tokens=False)
    parameters = SamplingParams(output_kind=DELTA, max_tokens=99)
    for seams in ((), *((seam,) for seam in range(1, len(tokens)))):
        answer = answered(calling_tokenizer, parameters, *seams, tokens=tokens)
        said, thought, called = read_by_client(answer, calling_tokenizer, tool=parser_name)
        assert (said, thought) == (SAID, ""), seams
        assert called.removeprefix("hold") == '{"text": "Zürich"}', (seams, called)


def test_a_trial_counts_what_was_sent(tokenizer: Any) -> None:
    """It ends once the engine is past the point of the death, in tokens of prompt and answer."""
    parameters = SamplingParams(output_kind=DELTA, max_tokens=99)
    answer = Answer()
    Books(tokenizer, parameters).feed(answer, end=6)
    tried = OUTPUTS.trial_arguments("generate", {"sampling_params": parameters})
    books = Books(tokenizer, tried["sampling_params"])
    restore(books.state, answer.sent)
    seen = Answer()
    books.feed(seen, 6, 7)
    assert OUTPUTS.context_tokens(seen.outputs[-1]) == len(PROMPT) + 7


def test_times_and_counts_are_those_of_one_request(tokenizer: Any) -> None:
    """It has one first token, and no time of the second engine precedes one of the first."""
    parameters = SamplingParams(output_kind=DELTA, max_tokens=99)
    answer = Answer()
    first = Books(tokenizer, parameters)
    first.state.stats.queued_ts, first.state.stats.scheduled_ts = 0.25, 0.5
    first.feed(answer, end=9)
    second = Books(tokenizer, parameters)
    restore(second.state, answer.sent)
    second.state.stats.queued_ts = 7.0
    second.feed(answer, 9)
    assert len(first.stats.time_to_first_tokens_iter) == 1
    assert second.stats.time_to_first_tokens_iter == []
    assert second.stats.prompt_token_stats.total == 0
    (finished,) = second.stats.finished_requests
    assert finished.num_generation_tokens == len(TOKENS)
    assert finished.queued_time == 0.25
    assert finished.num_cached_tokens == CACHED_TOKENS


def sent_request(**parameters: Any) -> Any:
    """What is sent to an engine that draws as the V1 runner does, after three tokens."""
    request = a_request(SamplingParams(output_kind=DELTA, **parameters))
    hand_over(request, SentAnswer([5, 6, 7]), draws_by_position=False)
    return request


def test_another_engine_draws_other_numbers() -> None:
    """With a seed that is always the same one for the same seam, and none where none was given."""
    seeds = [sent_request(seed=seed).sampling_params.seed for seed in (1, 1, 2)]
    assert seeds[0] == seeds[1]
    assert len({1, 2, *seeds}) == 4
    assert sent_request().sampling_params.seed is None
    kept = a_request(SamplingParams(seed=1))
    hand_over(kept, SentAnswer([5]), draws_by_position=True)
    assert kept.sampling_params is not None
    assert kept.sampling_params.seed == 1


def test_the_callers_parameters_stay_as_they_are() -> None:
    """They are those of the next engine, too; log-probs of the prompt were sent already."""
    parameters = SamplingParams(prompt_logprobs=1, extra_args={"x": 1})
    request = a_request(parameters)
    hand_over(request, SentAnswer([5]), draws_by_position=True)
    assert parameters.extra_args == {"x": 1}
    assert parameters.prompt_logprobs == 1
    assert request.sampling_params is not None
    assert request.sampling_params.extra_args == {"x": 1, SENT_TOKENS: [5]}
    assert request.sampling_params.prompt_logprobs is None


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's process, twice; what is put in the place of vLLM's code is taken back."""
    for owner, name in (
        (Request, "from_engine_core_request"),
        (StructuredOutputManager, "_create_grammar"),
        (gpu_model_runner, "CachedRequestState"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    for _ in range(2):
        resume_answers()
        keep_sent_tokens(SimpleNamespace(use_v2_model_runner=False))


@pytest.mark.usefixtures("patched")
def test_the_engine_has_the_answer_as_output() -> None:
    """So that limits, penalties and stops count it; the prompt is counted by the first engine."""
    hashed: list[int] = []

    def block_hasher(request: Any) -> list[Any]:
        hashed.append(request.num_tokens)
        return []

    made = Request.from_engine_core_request(sent_request(max_tokens=9), block_hasher)
    assert list(made.output_token_ids) == [5, 6, 7]
    assert list(made.all_token_ids) == [*PROMPT, 5, 6, 7]
    assert made.num_prompt_tokens == len(PROMPT)
    assert made.prefill_stats is None
    assert hashed[-1] == len(PROMPT) + 3
    new = Request.from_engine_core_request(a_request(SamplingParams()), None)
    assert list(new.output_token_ids) == []
    assert new.prefill_stats is not None


@pytest.mark.usefixtures("patched")
def test_a_worker_begins_with_the_answer() -> None:
    """It keeps its own list of a request's output, which is as long as the scheduler's."""

    def state(parameters: SamplingParams | None) -> Any:
        nothing: Any = {"mm_features": [], "generator": None, "block_ids": ([],)}
        return gpu_model_runner.CachedRequestState(
            req_id=NAME,
            prompt_token_ids=PROMPT,
            sampling_params=parameters,
            num_computed_tokens=0,
            output_token_ids=[],
            **nothing,
        )

    begun = state(sent_request().sampling_params)
    assert begun.output_token_ids == [5, 6, 7]
    assert begun.num_tokens == len(PROMPT) + 3
    assert state(SamplingParams()).output_token_ids == []
    assert state(None).output_token_ids == []


def test_a_worker_of_the_v2_runner_stays_as_it_is() -> None:
    """Its config says which runner it is, whatever attributes that has."""
    kind = gpu_model_runner.CachedRequestState
    keep_sent_tokens(SimpleNamespace(use_v2_model_runner=True))
    assert gpu_model_runner.CachedRequestState is kind


class Grammar:
    """A grammar that accepts anything but 666."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def accept_tokens(self, _request_id: str, tokens: list[int]) -> bool:
        self.accepted += tokens
        return 666 not in tokens


def advanced(reasoner: Any, tokens: list[int]) -> tuple[Grammar, Any]:
    """A grammar that vLLM's manager makes for an answer whose client has these tokens."""
    parameters = SamplingParams(
        output_kind=DELTA, structured_outputs=StructuredOutputsParams(regex="a")
    )
    request = a_request(parameters)
    hand_over(request, SentAnswer(tokens), draws_by_position=True)
    made = Request.from_engine_core_request(request, None)
    manager: Any = StructuredOutputManager.__new__(StructuredOutputManager)
    manager.enable_in_reasoning = False
    manager._get_reasoner = lambda _: reasoner
    grammar = Grammar()
    manager.backend = SimpleNamespace(compile_grammar=lambda *_, **__: grammar)
    assert manager._create_grammar(made) is grammar
    return grammar, made.structured_output_request


@pytest.mark.usefixtures("patched")
def test_a_grammar_has_accepted_what_was_sent() -> None:
    """All of it, if the model does not reason."""
    grammar, _ = advanced(None, [5, 6, 7, 8])
    assert grammar.accepted == [5, 6, 7, 8]


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("parser_name", REASONING_PARSERS)
def test_a_grammar_begins_after_the_reasoning(thinking_tokenizer: Any, parser_name: str) -> None:
    """Which ended before the seam, just at it, or goes on behind it."""
    reasoner = ReasoningParserManager.get_reasoning_parser(parser_name)(thinking_tokenizer)
    end = thinking_tokenizer.convert_tokens_to_ids(END_OF_THOUGHT)
    for sent, accepted, has_ended in (
        ([50, end, 70, 80], [70, 80], True),
        ([50, end], [], True),
        ([50, 50], [], False),
    ):
        grammar, structured = advanced(reasoner, sent)
        assert grammar.accepted == accepted
        assert bool(structured.reasoning_ended) is has_ended


@dataclass
class SlowReasoner:
    """A parser that looks at each of the tokens that it is given, and counts them."""

    end: int
    looked_at: int = 0

    def is_reasoning_end(self, tokens: Sequence[int]) -> bool:
        """Whether the prompt ends the reasoning."""
        return self.end in tokens

    def is_reasoning_end_streaming(self, tokens: Sequence[int], delta: Sequence[int]) -> bool:
        """Whether the new tokens do."""
        assert list(tokens[-len(delta) :]) == list(delta)
        self.looked_at += len(delta)
        return self.end in delta


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("place", [0, 1, 63, 64, 65, 2000, 4094, 4095])
def test_the_beginning_of_a_grammar_is_found_in_a_long_answer(place: int) -> None:
    """Without going over all of it again for each token, for which EngineCore would stand still."""
    sent = [50] * 4096
    sent[place] = 51
    reasoner = SlowReasoner(end=51)
    grammar, structured = advanced(reasoner, sent)
    assert grammar.accepted == sent[place + 1 :]
    assert structured.reasoning_ended
    assert reasoner.looked_at < 3 * len(sent)


@pytest.mark.usefixtures("patched")
def test_a_grammar_that_does_not_accept_it_fails_the_request() -> None:
    """By an exception, which vLLM turns into an error of this request alone."""
    with pytest.raises(ValueError, match="does not accept"):
        advanced(None, [5, 666])


CONTINUABLE: dict[str, Any] = {
    "output_kind": DELTA,
    "seed": 7,
    "stop": ["x"],
    "frequency_penalty": 1.0,
}


@pytest.mark.parametrize(
    ("options", "is_continuable"),
    [
        ({}, True),
        ({"structured_outputs": StructuredOutputsParams(regex="a")}, True),
        ({"n": 2}, False),
        ({"output_kind": RequestOutputKind.FINAL_ONLY}, False),
        ({"thinking_token_budget": 9}, True),
        ({"trace_decode_token_ids": [9]}, False),
    ],
)
def test_what_can_go_on(options: dict[str, Any], *, is_continuable: bool) -> None:
    """A stream of one answer, whose state follows from its tokens."""
    arguments = {"sampling_params": SamplingParams(**{**CONTINUABLE, **options})}
    assert OUTPUTS.is_continuable(arguments) is is_continuable
    assert not OUTPUTS.is_continuable({"pooling_params": object()})


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_what_is_streamed(kind: RequestOutputKind) -> None:
    """Any other answer comes as a whole."""
    arguments = {"sampling_params": SamplingParams(output_kind=kind)}
    assert OUTPUTS.is_answer_streamed(arguments) is (kind is RequestOutputKind.DELTA)
    assert not OUTPUTS.is_answer_streamed({"pooling_params": object()})


@pytest.mark.parametrize(
    ("model", "further", "is_on", "may_go_on"),
    [
        ({}, {}, True, True),
        ({}, {}, False, False),
        ({"is_encoder_decoder": True}, {}, True, False),
        ({"is_diffusion": True}, {}, True, False),
        ({}, {"enable_return_routed_experts": True}, True, False),
    ],
)
def test_which_model_can_go_on(
    model: dict[str, bool], further: dict[str, bool], *, is_on: bool, may_go_on: bool
) -> None:
    """One that writes token by token, if `--continue-streams` is on."""
    proxy = EngineProxy(continues_streams=is_on)
    proxy.use(
        SimpleNamespace(
            vllm_config=SimpleNamespace(aux_output_config=SimpleNamespace(**further)),
            model_config=SimpleNamespace(**model),
            renderer=None,
            input_processor=None,
        )
    )
    assert proxy.continues_streams() is may_go_on


@pytest.mark.parametrize(("room", "has_room"), [(9, True), (8, False)])
def test_an_engine_needs_room_for_another_token(room: int, *, has_room: bool) -> None:
    """The context of the next engine may be shorter, as its proof may be."""
    output = SimpleNamespace(prompt_token_ids=PROMPT)
    llm = SimpleNamespace(model_config=SimpleNamespace(max_model_len=room))
    arguments = {"prompt": PROMPT}
    sent = SentAnswer([5, 6, 7], output)
    found = OUTPUTS.continued_arguments(arguments, sent, llm)
    assert found == ({"prompt": ContinuedPrompt(PROMPT, sent)} if has_room else None)
    assert OUTPUTS.continued_arguments(arguments, SentAnswer(), llm) is arguments


@pytest.mark.parametrize("sent_tokens", [0, 3])
@pytest.mark.parametrize(("room", "max_tokens"), [(100, 50), (54, 49), (55, 50)])
def test_an_answer_ends_within_what_the_next_engine_has_proven(
    sent_tokens: int, room: int, max_tokens: int
) -> None:
    """Its route counted on the room of the engine before; the caller's parameters stay."""
    prompt = {"type": "token", "prompt_token_ids": PROMPT}
    parameters = SamplingParams(output_kind=DELTA, max_tokens=50)
    arguments = {"prompt": prompt, "sampling_params": parameters}
    sent = SentAnswer([5] * sent_tokens, SimpleNamespace(prompt_token_ids=PROMPT))
    llm = SimpleNamespace(model_config=SimpleNamespace(max_model_len=room))
    found = OUTPUTS.continued_arguments(arguments, sent, llm)
    assert found is not None
    assert found["sampling_params"].max_tokens == max_tokens
    assert parameters.max_tokens == 50


def test_what_was_sent_is_known_while_a_request_is_added() -> None:
    """In the task that adds it, and in no other."""
    sent = SentAnswer([5])

    async def scene() -> None:
        with going_on(ContinuedPrompt("a", sent)) as prompt:
            assert (prompt, sent_answer()) == ("a", sent)
        with going_on("b") as prompt:
            assert (prompt, sent_answer()) == ("b", None)
        assert sent_answer() is None

    asyncio.run(scene())
