"""An EngineCore's grammars are bounded, and fill the masks that vLLM's own would."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.request import StructuredOutputRequest

from holdfast.demo.files import ensure_demo_model
from holdfast.patches import grammar_compilation, grammar_steps, grammars
from holdfast.patches.continued import SENT_TOKENS
from holdfast.patches.grammar_compilation import COMPILES_TOO_LONG, NOT_COMPILED
from holdfast.patches.grammar_memory import NO_ROOM, give_back, private_bytes
from holdfast.patches.grammar_steps import SECONDS_PER_TOKEN, TOO_LARGE, TOO_SLOW
from holdfast.patches.grammars import DEAD_END, bound_grammars
from servers import wait_until

# vLLM gives xgrammar an argument that it does not need any more.
pytestmark = pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning")

DEADLINE_SECONDS = 60.0
DRAFTS = 3
NO_DRAFTS: dict[str, list[int]] = {}
AMBIGUOUS = {"grammar": 'root ::= "a" s "z"\ns ::= s s | "a"'}
"""Each token takes longer than the one before; a usual trial sees the first ones only."""
MIB = 1 << 20
LEFT_BYTES = 4 * MIB
"""What an allocator may keep of whatever it gave to threads."""
LITERAL = "an answer that begins as usual: "
_RULES = [f"r{number:x}" for number in range(4500)]
EXPLOSIVE = {
    "grammar": "\n".join(
        (
            f'root ::= "{LITERAL}" s',
            f"s ::= {' | '.join(_RULES)}",
            *(f'{one} ::= "a" ("b{at % 97}" | "" | {one} "q")' for at, one in enumerate(_RULES)),
        )
    )
}
"""After the literal, which no trial leaves behind, one token adds 210 MiB of states. Up to 64 MiB
may be no growth: glibc keeps that much at the top of an arena that earlier tests have used."""
CIRCULAR = {"$defs": {"one": {"anyOf": [{"$ref": "#/$defs/one"}]}}, "$ref": "#/$defs/one"}
"""What is one of itself: nothing is."""
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "ages": {"type": "array"}},
    "required": ["name", "ages"],
}
ANSWER = '{"name": "Ada", "ages": [1, 36]}'


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """That of the demo model, with its tokenizer and three drafts a step."""
    model = ensure_demo_model(tmp_path_factory.mktemp("models"))
    return AsyncEngineArgs(
        model=str(model),
        max_model_len=4096,
        max_num_seqs=8,
        speculative_config={"method": "ngram", "num_speculative_tokens": DRAFTS},
    ).create_engine_config()


@pytest.fixture(autouse=True)
def _vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put in the place of vLLM's code is taken back."""
    for name in ("grammar_init", "grammar_bitmask", "accept_tokens", "_create_grammar"):
        monkeypatch.setattr(StructuredOutputManager, name, getattr(StructuredOutputManager, name))


class Steps:
    """An EngineCore's grammars, step for step."""

    def __init__(self, config: Any) -> None:
        self.manager = StructuredOutputManager(config)
        self.requests: dict[str, Any] = {}

    def add(
        self, name: str, grammar: dict[str, Any], backend: str = "xgrammar", **options: Any
    ) -> Any:
        """Add a request, as EngineCore does; it compiles."""
        constraint = StructuredOutputsParams(**grammar)
        constraint._backend = backend
        parameters = SamplingParams(structured_outputs=constraint, **options)
        request = self.requests[name] = SimpleNamespace(
            request_id=name,
            sampling_params=parameters,
            structured_output_request=StructuredOutputRequest(constraint),
            use_structured_output=True,
            stop_reason=None,
        )
        self.manager.grammar_init(request)
        return request

    def compiled(self, name: str, grammar: dict[str, Any], backend: str = "xgrammar") -> Any:
        """Add a request, and return it when its grammar is ready."""
        request = self.add(name, grammar, backend)
        wait_until(
            lambda: request.structured_output_request.grammar is not None,
            deadline_seconds=DEADLINE_SECONDS,
            what=lambda: f"{grammar} still compiles",
        )
        return request

    def masks(self, drafts: dict[str, list[int]] = NO_DRAFTS) -> Any:
        """The masks of one step, of all requests."""
        return self.manager.grammar_bitmask(self.requests, list(self.requests), drafts)

    def accept(self, request: Any, tokens: list[int]) -> bool:
        return bool(self.manager.accept_tokens(request, tokens))

    def tokens(self, text: str) -> list[int]:
        return list(self.manager.tokenizer.encode(text, add_special_tokens=False))


def steps_of(answered: Steps, backend: str) -> list[Any]:
    """All masks of two requests that write an answer with good and bad drafts."""
    person = answered.compiled("person", {"json": PERSON}, backend)
    letters = answered.compiled("letters", {"regex": "[a-z]+"}, backend)
    answer, [letter] = answered.tokens(ANSWER), answered.tokens("b")
    seen = []
    for at in range(0, len(answer), 2):
        asked = [*answer[at : at + 2], letter][:DRAFTS]
        drafts = answered.manager.validate_tokens(person, asked)
        padded = drafts + [-1] * (DRAFTS - len(drafts))
        seen += [drafts, answered.masks({"person": padded}).copy()]
        assert answered.accept(person, answer[at : at + 2])
        assert answered.accept(letters, [letter])
    return seen


@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
def test_bounded_grammars_fill_the_same_masks(config: Any, backend: str) -> None:
    """With drafts and without, token for token."""
    own = steps_of(Steps(config), backend)
    bound_grammars(DEADLINE_SECONDS)
    bounded = steps_of(Steps(config), backend)
    assert len(own) == len(bounded)
    assert all(np.array_equal(one, other) for one, other in zip(own, bounded, strict=True))


@pytest.mark.parametrize("first", ["xgrammar", "guidance"])
def test_each_grammar_has_the_backend_that_was_chosen_for_it(config: Any, first: str) -> None:
    """Whichever came first; xgrammar ignores what it does not support of this schema."""
    bound_grammars(DEADLINE_SECONDS)
    steps = Steps(config)
    steps.compiled("first", {"regex": "[0-9]+"}, first)
    fourteen = {"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 19}
    steps.compiled("second", {"json": fourteen}, "guidance")
    steps.compiled("third", {"regex": "[0-9]+"}, "xgrammar")
    steps.masks()
    for name in steps.requests:
        assert steps.accept(steps.requests[name], steps.tokens("1"))
    bits = np.unpackbits(steps.masks().view(np.uint8), axis=1, bitorder="little")
    digits = [steps.tokens(str(digit))[0] for digit in range(10)]
    allowed = [row[digits].nonzero()[0].tolist() for row in bits]
    assert allowed == [list(range(10)), [4], list(range(10))]


def test_a_grammar_that_leads_nowhere_ends_with_its_request(config: Any) -> None:
    """At the token at which nothing is allowed any more."""
    bound_grammars(DEADLINE_SECONDS)
    steps = Steps(config)
    blocked = steps.compiled("blocked", {"json": CIRCULAR})
    usual = steps.compiled("usual", {"regex": "b+"})
    steps.masks()
    assert not steps.accept(blocked, steps.tokens("a"))
    assert blocked.stop_reason == DEAD_END
    assert steps.accept(usual, steps.tokens("b"))


def test_a_grammar_that_grows_ends_with_its_request(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No trial can find it; here it has its quarter of a second for all tokens together."""
    monkeypatch.setattr(grammar_steps, "SECONDS_PER_TOKEN", 0.0)
    bound_grammars(DEADLINE_SECONDS)
    steps = Steps(config)
    growing, usual = steps.compiled("growing", AMBIGUOUS), steps.compiled("usual", {"regex": "b+"})
    [a], [b] = steps.tokens("a"), steps.tokens("b")
    steps.masks()
    tokens = 0
    while steps.accept(growing, [a]) and tokens < 4000:
        tokens += 1
        steps.accept(usual, [b])
        masks = steps.masks()
        [row] = masks[len(masks) // 2 :][:1]
        allowed = np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0]
        assert b in allowed
        assert a not in allowed
    assert growing.stop_reason == TOO_SLOW
    assert usual.stop_reason is None


def test_a_grammar_whose_answer_takes_too_much_memory_ends_with_its_request(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In time: none of it was needed before. What it took is given back."""
    # On a slow processor the token that takes the memory takes longer than a token may.
    monkeypatch.setattr(grammar_steps, "SECONDS_PER_TOKEN", DEADLINE_SECONDS)
    bound_grammars(DEADLINE_SECONDS)
    steps = Steps(config)
    growing, usual = steps.compiled("growing", EXPLOSIVE), steps.compiled("usual", {"regex": "b+"})
    steps.masks()
    gc.collect()
    give_back()  # so that what is used again does not count as growth
    before_bytes = private_bytes()
    for token in steps.tokens(LITERAL):
        assert steps.accept(growing, [token])
        assert steps.accept(usual, steps.tokens("b"))
        steps.masks()
    assert not steps.accept(growing, steps.tokens("a"))
    assert growing.stop_reason == TOO_LARGE
    assert private_bytes() < before_bytes + 32 * MIB
    assert steps.accept(usual, steps.tokens("b"))


@pytest.mark.parametrize(
    "grammar",
    [
        {"grammar": "root ::= " + " | ".join(f'"a choice {number}"' for number in range(12_000))},
        {"json": {"properties": {f"p{number}": {"type": "integer"} for number in range(2000)}}},
        {
            "json": {
                "properties": {f"p{at}": {"type": "string", "maxLength": 300} for at in range(30)}
            }
        },
    ],
    ids=["choices", "properties", "lengths"],
)
def test_a_grammar_takes_no_more_than_is_counted(config: Any, grammar: dict[str, Any]) -> None:
    """Or the grammars of an engine would take more than they may."""
    bound_grammars(DEADLINE_SECONDS)
    steps = Steps(config)
    steps.compiled("first", {"regex": "[a-z]+"})
    give_back()
    before_bytes = private_bytes()
    large = steps.compiled("large", grammar)
    give_back()
    taken_bytes = private_bytes() - before_bytes
    counted_bytes = large.structured_output_request.grammar.compiled_bytes
    assert counted_bytes + LEFT_BYTES > taken_bytes


def test_grammars_that_take_too_much_memory_together_end_the_largest_first(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as the last has compiled, whatever came first. Here two of four fit."""
    monkeypatch.setattr(grammars, "GRAMMARS_AT_ONCE", 1 / 25)
    bound_grammars(DEADLINE_SECONDS)
    steps = Steps(config)
    usual = steps.compiled("usual", {"json": PERSON})
    large = [
        steps.compiled(
            str(number),
            {"grammar": "root ::= " + " | ".join(f'"{number} {choice}"' for choice in range(5000))},
        )
        for number in range(4)
    ]
    steps.masks()
    assert steps.accept(usual, steps.tokens("{"))
    accepted = [steps.accept(one, steps.tokens(str(number))) for number, one in enumerate(large)]
    assert accepted.count(False) == 2
    assert [one.stop_reason for one in large] == [None if fits else NO_ROOM for fits in accepted]


def test_a_lost_thread_writes_to_no_mask_of_others(config: Any) -> None:
    """It goes on with the one that it was given, which nothing reads any more."""
    bound_grammars(DEADLINE_SECONDS)
    steps = Steps(config)
    stuck = steps.compiled("stuck", {"regex": "b+"})
    go_on, has_written = threading.Event(), threading.Event()

    class Stuck:
        """A grammar in native code that is busy until it is told to write."""

        def is_terminated(self) -> bool:
            return False

        def fill_bitmask(self, mask: Any, row: int) -> None:
            while not go_on.is_set():
                sum(range(1000))
            mask[row].fill_(0)
            has_written.set()

    stuck.structured_output_request.grammar._grammar = Stuck()
    mask = steps.masks()
    go_on.set()
    assert has_written.wait(DEADLINE_SECONDS)
    assert (mask == -1).all()
    assert not steps.accept(stuck, steps.tokens("b"))


def test_what_a_grammar_does_not_accept_ends_its_request(config: Any) -> None:
    """As in vLLM, one token later, and without a word about CPU time."""
    bound_grammars(DEADLINE_SECONDS)
    steps = Steps(config)
    wrong = steps.compiled("wrong", {"regex": "b+"})
    steps.masks()
    steps.accept(wrong, steps.tokens("a"))
    steps.masks()
    assert not steps.accept(wrong, steps.tokens("b"))
    assert wrong.stop_reason not in {TOO_SLOW, COMPILES_TOO_LONG}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, or the test has ended, the grammar of the request `slow` compiles."""
    event, create = threading.Event(), StructuredOutputManager._create_grammar

    def create_slowly(manager: Any, request: Any) -> Any:
        if request.request_id == "slow":
            event.wait(DEADLINE_SECONDS)
        return create(manager, request)

    monkeypatch.setattr(StructuredOutputManager, "_create_grammar", create_slowly)
    yield event
    event.set()


@pytest.mark.usefixtures("compiled")
def test_a_grammar_that_compiles_for_too_long_ends_beside_others(config: Any) -> None:
    """However busy the engine is: its request is scheduled, and ends with its first token."""
    bound_grammars(DEADLINE_SECONDS)
    steps = Steps(config)
    usual = steps.compiled("usual", {"regex": "b+"})
    bound_grammars(0.0)
    slow = steps.add("slow", {"regex": "c+"})
    wait_until(
        lambda: slow.structured_output_request.is_grammar_ready,
        deadline_seconds=DEADLINE_SECONDS,
        what=lambda: "no thread has begun with it",
    )
    steps.masks()
    assert steps.accept(usual, steps.tokens("b"))
    assert not steps.accept(slow, steps.tokens("c"))
    assert slow.stop_reason == COMPILES_TOO_LONG


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("queue_seconds", "is_given_up"), [(DEADLINE_SECONDS, False), (0.0, True)])
def test_the_time_that_others_compile_is_not_that_of_a_grammar(
    config: Any, monkeypatch: pytest.MonkeyPatch, queue_seconds: float, *, is_given_up: bool
) -> None:
    """After a death all come at once, and vLLM has few threads; but none waits without end."""
    monkeypatch.setattr(grammar_compilation, "MAX_QUEUE_SECONDS", queue_seconds)
    bound_grammars(0.0)
    steps = Steps(config)
    steps.manager.executor = ThreadPoolExecutor(1)
    steps.add("slow", {"regex": "c+"})
    wanted = steps.add("usual", {"regex": "b+"}).structured_output_request
    assert wanted.is_grammar_ready is is_given_up
    assert not is_given_up or wanted.grammar.stop_reason == NOT_COMPILED


def test_a_grammar_of_a_begun_answer_may_take_longer_by_its_tokens(
    config: Any, compiled: threading.Event
) -> None:
    """It reads the answer again, which is not the fault of the grammar."""
    bound_grammars(0.0)
    steps = Steps(config)
    sent = [1] * math.ceil(DEADLINE_SECONDS / SECONDS_PER_TOKEN)
    begun = steps.add("slow", {"regex": "b+"}, extra_args={SENT_TOKENS: sent})
    assert not begun.structured_output_request.is_grammar_ready
    compiled.set()
    wait_until(
        lambda: begun.structured_output_request.is_grammar_ready,
        deadline_seconds=DEADLINE_SECONDS,
        what=lambda: "it still compiles",
    )
    assert steps.accept(begun, steps.tokens("b"))
