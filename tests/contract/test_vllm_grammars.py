"""What is taken for granted of vLLM's grammars, and what becomes of those that break it."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import os
import resource
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from http import HTTPStatus
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.parser import abstract_parser
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.structured_output import StructuredOutputManager, backend_xgrammar

import scripted_compiler
from holdfast.demo.files import ensure_demo_model
from holdfast.engine.grammars import checker
from holdfast.engine.grammars import compiler as compiler_module
from holdfast.engine.grammars.checker import QUICK_SLOTS, GrammarChecker, grammar_checker
from holdfast.engine.grammars.compiler import Compiler
from holdfast.engine.grammars.given_up import refusing
from holdfast.engine.grammars.pool import Pool, TrialReply
from holdfast.engine.grammars.requests import check_in_workers, validate_without_xgrammar
from holdfast.engine.grammars.text import MAX_GRAMMAR_BYTES, grammar_text
from holdfast.errors import OverloadedError
from holdfast.patches import grammar_steps
from holdfast.patches.grammar_compilation import COMPILES_TOO_LONG, NOT_COMPILED
from holdfast.patches.grammar_memory import NO_ROOM
from holdfast.patches.grammar_steps import HAD_NO_TIME, TOO_LARGE, TOO_SLOW
from holdfast.patches.grammars import DEAD_END
from holdfast.processes import forkserver, tree
from holdfast.request_context import REQUEST, RequestContext
from hostile import grammars as hostile_grammars
from hostile.target import Target
from owned_processes import owned_processes
from scripted_capacity import ScriptedCapacity

# vLLM gives xgrammar an argument that it does not need any more.
pytestmark = pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning")

DEADLINE_SECONDS = 60.0
DEEP = "(" * 40_000 + "a" + ")" * 40_000
TURN_NEVER_CAME = "Too many other grammars are being checked. Try again later."
HAD_NO_CORE = "This machine is too busy to check the grammar. Try again later."
PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


def with_pattern(pattern: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}


def tagged(schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "structural_tag",
        "format": {"type": "json_schema", "json_schema": schema},
    }


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """That of the demo model, with its tokenizer."""
    model = ensure_demo_model(tmp_path_factory.mktemp("models"))
    return AsyncEngineArgs(model=str(model), max_model_len=256).create_engine_config()


@pytest.fixture(scope="module")
def compiler(config: Any) -> Compiler:
    return Compiler(config)


@pytest.fixture
def _server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A fork server that has imported nothing."""
    monkeypatch.setattr(forkserver, "PRELOADED", ())
    with owned_processes(tmp_path):
        yield


def ended(compiler: Compiler, grammar: dict[str, Any]) -> int:
    """The exit code of a process that compiles a grammar."""
    pid = os.fork()
    if not pid:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        signal.alarm(int(DEADLINE_SECONDS))
        os._exit(0 if "error" not in compiler(grammar) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# What vLLM does


def test_vllm_checks_no_grammar_without_a_configuration_for_them() -> None:
    """That is how its front end is kept from compiling: it would end itself by this one."""
    parameters = SamplingParams(structured_outputs=StructuredOutputsParams(json=with_pattern(DEEP)))
    parameters._validate_structured_outputs(None, None, None)
    assert "self.structured_outputs_config," in inspect.getsource(InputProcessor._validate_params)


def test_a_worker_compiles_as_an_engine_does() -> None:
    """The names of the backends, and what each is made with."""
    source = inspect.getsource(StructuredOutputManager.grammar_init)
    for name, (_, backend) in compiler_module._BACKENDS.items():
        assert f'"{name}"' in source
        assert backend in source
    assert source.count("vocab_size=vocab_size") == len(compiler_module._BACKENDS)
    assert "get_vocab_size()" in source
    assert "cached_tokenizer_from_config" in inspect.getsource(StructuredOutputManager.__init__)


def test_a_request_whose_grammar_compiles_is_deferred() -> None:
    """It is among those that the scheduler skips, and not among those that wait."""
    source = inspect.getsource(Scheduler)
    assert "RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR" in inspect.getsource(
        Scheduler._is_blocked_waiting_status
    )
    assert "num_waiting_reqs=num_waiting - num_deferred" in source
    assert "num_skipped_waiting_reqs=num_deferred" in source


def test_a_grammar_ends_a_request_only_after_its_prompt() -> None:
    """Even one that was never compiled: vLLM asks it about the first token of the answer."""
    source = inspect.getsource(Scheduler.update_from_output)
    assert "if new_token_ids and not self.structured_output_manager.accept_tokens(" in source


# What a worker does


@pytest.mark.parametrize(
    ("grammar", "backend", "changed"),
    [
        ({"json": PERSON}, "xgrammar", set()),
        ({"json": json.dumps(PERSON)}, "xgrammar", set()),
        ({"json_object": True}, "xgrammar", set()),
        ({"regex": "[a-z]+"}, "xgrammar", set()),
        ({"choice": ["yes", "no"]}, "xgrammar", {"choice", "grammar"}),
        ({"grammar": 'root ::= "a"'}, "xgrammar", set()),
        ({"structural_tag": json.dumps(tagged(PERSON))}, "xgrammar", set()),
        ({"json": {"type": "integer", "multipleOf": 3}}, "guidance", set()),
    ],
)
def test_a_grammar_is_left_as_vllms_checks_leave_it(
    compiler: Compiler, grammar: dict[str, Any], backend: str, changed: set[str]
) -> None:
    """With the backend that they choose."""
    result = compiler(grammar)
    assert result.get("backend") == backend, result
    assert set(result["changed"]) == changed
    expected = StructuredOutputsParams(**grammar)
    SamplingParams(structured_outputs=expected).verify(
        compiler._model, None, compiler._config.structured_outputs_config, compiler._tokenizer
    )
    assert result["changed"] == {name: getattr(expected, name) for name in changed}
    assert result["was_auto"] == expected._backend_was_auto


@pytest.mark.parametrize("backend", ["xgrammar", "guidance", "outlines"])
def test_each_backend_that_can_be_named_compiles(config: Any, backend: str) -> None:
    """As far as its masks; and what ends a process never passes."""
    named = copy.deepcopy(config)
    named.structured_outputs_config.backend = backend
    compiler = Compiler(named)
    assert compiler({"regex": "[a-c]+"}).get("backend") == backend
    assert ended(compiler, {"json": with_pattern(DEEP)}) != 0


def test_a_grammar_without_any_answer_is_refused(compiler: Compiler) -> None:
    """An engine would sample what the grammar forbids, and fail."""
    circular = {"$defs": {"one": {"anyOf": [{"$ref": "#/$defs/one"}]}}, "$ref": "#/$defs/one"}
    assert "allows no token" in compiler({"json": circular})["error"]


def test_a_grammar_that_takes_too_much_memory_says_so(compiler: Compiler) -> None:
    """Not as an error of the grammar, in the words of C++."""
    with pytest.MonkeyPatch.context() as patched:
        backend = compiler._backend("xgrammar")
        patched.setattr(backend, "compile_grammar", _without_memory)
        with pytest.raises(MemoryError):
            compiler({"regex": "[a-z]+"})


def _without_memory(*_arguments: Any) -> Any:
    raise RuntimeError("std::bad_alloc")


def test_a_trial_writes_only_tokens_of_the_vocabulary(
    compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    """A mask has more bits than that, and xgrammar complains about what they stand for."""
    assert "error" not in compiler({"regex": "[^x]+"})
    assert not caplog.records


def test_a_wrong_grammar_is_refused_in_the_words_of_vllm(compiler: Compiler) -> None:
    """As it always was."""
    assert "cannot be an empty list" in compiler({"choice": []})["error"]


@pytest.mark.parametrize(
    "schema",
    [
        with_pattern(DEEP),
        with_pattern("(?:" * 40_000 + "a" + ")" * 40_000),
        with_pattern("a" + "*" * 100_000),
        {"type": "object", "patternProperties": {DEEP: {"type": "string"}}},
        {"type": "object", "propertyNames": {"pattern": DEEP}},
    ],
    ids=["groups", "no-captures", "stars", "names", "property-names"],
)
def test_no_grammar_that_ends_a_process_survives_a_worker(
    compiler: Compiler, schema: dict[str, Any]
) -> None:
    """It is ended by the signal, or refused: it never passes."""
    assert ended(compiler, {"json": schema}) != 0


def test_a_grammar_that_is_slow_after_a_literal_is_refused(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a hundredth of what such a grammar may take is too slow, and a usual schema is not."""
    monkeypatch.setattr(grammar_steps, "SECONDS_PER_TOKEN", 0.001)
    monkeypatch.setattr(grammar_steps, "BURST_SECONDS", 0.0)
    monkeypatch.setattr(compiler_module, "GrammarBudget", partial(grammar_steps.GrammarBudget, 0.0))
    rules = "\n".join(f"r{number} ::= r{number + 1}" for number in range(4000))
    chained = f'root ::= "a literal of many tokens " r0\n{rules}\nr4000 ::= "a"'
    assert "CPU time per token" in compiler({"grammar": chained})["error"]
    # A collection of this process may fall into one of them.
    assert any("error" not in compiler({"json": PERSON}) for _ in range(5))


# What the front end makes of it


def scripted(timeout_seconds: float = DEADLINE_SECONDS) -> tuple[GrammarChecker, Pool]:
    """Grammars that do as they say, see `grammars`."""
    pool = Pool(scripted_compiler.make, workers=4, memory_bytes=256 << 20)
    return GrammarChecker(pool, timeout_seconds=timeout_seconds), pool


async def check(asked: GrammarChecker, regex: str, key: str = "") -> str:
    """The backend that a grammar got."""
    REQUEST.set(RequestContext("one", key))
    constraint = StructuredOutputsParams(regex=regex)
    await asked.check(constraint)
    return str(constraint._backend)


@pytest.mark.usefixtures("_server")
def test_the_front_end_outlives_a_grammar_that_ends_a_process(config: Any) -> None:
    """It refuses it, remembers that, and goes on."""

    async def scene() -> None:
        asked = grammar_checker(config, DEADLINE_SECONDS)
        deadly = StructuredOutputsParams(json=with_pattern(DEEP))
        for _ in range(2):
            with pytest.raises(VLLMValidationError, match="crashed"):
                await asked.check(deadly)
        choice = StructuredOutputsParams(choice=["yes", "no"])
        await asked.check(choice)
        assert (choice.choice, choice._backend) == (None, "xgrammar")
        assert choice.grammar is not None
        asked._pool.stop()

    asyncio.run(scene())


@pytest.mark.usefixtures("_server")
def test_a_grammar_that_many_clients_send_is_compiled_once() -> None:
    """Side by side, and later."""

    async def scene() -> None:
        asked, pool = scripted()
        workers = await asyncio.gather(*(check(asked, "sleep 0.2") for _ in range(8)))
        assert len(set(workers)) == 1
        tree.kill(pool.processes())
        assert await check(asked, "sleep 0.2") == workers[0]
        pool.stop()

    asyncio.run(scene())


@pytest.mark.usefixtures("_server")
def test_a_slow_grammar_of_one_key_holds_up_no_other() -> None:
    """Nor do many of them: those that are not slow go on, and so does a slow one of another key."""

    async def scene() -> None:
        asked, pool = scripted()
        slow = [asyncio.create_task(check(asked, f"sleep 300.{n}", "bad")) for n in range(4)]
        assert await check(asked, "", "good")
        assert await check(asked, "sleep 1.5", "good")
        assert await check(asked, "sleep 0.1", "good")
        assert not any(one.done() for one in slow)
        for one in slow:
            one.cancel()
        pool.stop()
        await asyncio.gather(*slow, return_exceptions=True)

    asyncio.run(scene())


@pytest.mark.usefixtures("_server")
def test_no_key_waits_in_the_queue_of_another_for_the_same_grammar() -> None:
    """Many grammars of one key come first in its own queue, among them the one of the other."""

    async def scene() -> None:
        asked, pool = scripted()
        grammars = [*(f"sleep 0.9{n:03}" for n in range(100)), "sleep 0.1"]
        queued = [asyncio.create_task(check(asked, grammar, "bad")) for grammar in grammars]
        await asyncio.sleep(0)  # all of them wait for their turns
        assert await check(asked, "sleep 0.1", "good")
        assert sum(one.done() for one in queued) < 20
        for one in queued:
            one.cancel()
        pool.stop()
        await asyncio.gather(*queued, return_exceptions=True)

    asyncio.run(scene())


class _BusyPool:
    """Starts no process, and finds every grammar slow once it may reply."""

    memory_bytes = 0

    def __init__(self) -> None:
        self.may_reply = asyncio.Event()
        self.trials = 0

    async def compile(self, *_: Any, **__: Any) -> TrialReply:
        self.trials += 1
        await self.may_reply.wait()
        return TrialReply(None, signal.SIGPROF, 1.0)

    async def until_gone(self, _pid: int) -> None:
        return


def test_nothing_is_kept_of_a_grammar_whose_clients_left_before_its_turn() -> None:
    """Half a MiB each. One that has its turn goes on, and one for which a client waits is kept."""

    async def scene() -> None:
        pool = _BusyPool()
        asked = GrammarChecker(cast("Pool", pool), timeout_seconds=DEADLINE_SECONDS)
        tried = [asyncio.create_task(check(asked, str(n), "bad")) for n in range(QUICK_SLOTS)]
        queued = [asyncio.create_task(check(asked, "queued", "bad")) for _ in range(3)]
        await asyncio.sleep(0.05)
        for one in (*tried, *queued[:2]):
            one.cancel()
        await asyncio.sleep(0.05)
        assert len(asked._trials) == QUICK_SLOTS + 1
        queued[2].cancel()
        again = asyncio.create_task(check(asked, "queued", "bad"))
        await asyncio.sleep(0.05)
        assert len(asked._trials) == QUICK_SLOTS + 1
        assert not again.done()
        again.cancel()
        await asyncio.sleep(0.05)
        assert len(asked._trials) == QUICK_SLOTS
        pool.may_reply.set()
        await asyncio.sleep(0.05)
        assert not asked._trials
        assert pool.trials == QUICK_SLOTS

    asyncio.run(scene())


@pytest.mark.usefixtures("_server")
def test_a_grammar_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the limit, and as the fault of the client."""
    monkeypatch.setattr(checker, "LEAST_SHARE", 0.0)  # others may keep the cores busy

    async def scene() -> None:
        asked, pool = scripted(2.0)
        with pytest.raises(VLLMValidationError, match="longer than 2 s to compile"):
            await check(asked, "spin")
        pool.stop()

    asyncio.run(scene())


@pytest.mark.usefixtures("_server")
def test_a_grammar_that_takes_too_much_memory_is_refused() -> None:
    """With the limit, and as the fault of the client."""

    async def scene() -> None:
        asked, pool = scripted()
        with pytest.raises(VLLMValidationError, match="256 MiB of memory"):
            await check(asked, "grow")
        pool.stop()

    asyncio.run(scene())


@pytest.mark.usefixtures("_server")
def test_a_request_has_no_capacity_while_its_grammar_is_tried() -> None:
    """A host of slow ones keeps none from others; what is known already keeps its own."""

    async def scene() -> list[str]:
        asked, pool = scripted()
        capacity = ScriptedCapacity()
        REQUEST.set(RequestContext("one", "key", capacity=capacity))
        trying = asyncio.create_task(asked.check(StructuredOutputsParams(regex="sleep 0.1")))
        await capacity.given.wait()
        assert not trying.done()
        await trying
        await asked.check(StructuredOutputsParams(regex="sleep 0.1"))
        pool.stop()
        return capacity.said

    assert asyncio.run(scene()) == ["given", "taken"]


@pytest.mark.usefixtures("_server")
def test_a_request_that_gets_no_capacity_back_is_told_when_to_come_again() -> None:
    """As one that the queue refuses at once."""

    async def scene() -> tuple[bool | None, int | None]:
        asked, pool = scripted()
        full = ScriptedCapacity(OverloadedError("It is full.", retry_after_seconds=17))
        context = RequestContext("one", "key", capacity=full)
        REQUEST.set(context)
        with pytest.raises(GracefulHTTPError, match="It is full"):
            await asked.check(StructuredOutputsParams(regex="sleep 0.1"))
        pool.stop()
        return context.may_be_retried, context.retry_after_seconds

    assert asyncio.run(scene()) == (True, 17)


def assert_429(found: list[str | BaseException], messages: set[str]) -> None:
    """Assert that all are refused for now, with each of the messages."""
    late = [one for one in found if isinstance(one, GracefulHTTPError)]
    assert len(late) == len(found)
    assert {one.http_status for one in late} == {HTTPStatus.TOO_MANY_REQUESTS}
    assert {str(one) for one in late} == messages


@pytest.mark.usefixtures("_server")
def test_a_short_trial_whose_turn_does_not_come_may_be_sent_again() -> None:
    """Nobody waits without end behind the grammars of others."""

    async def scene() -> None:
        asked, pool = scripted(1.0)
        slow = [asyncio.create_task(check(asked, f"sleep 60.{n}")) for n in range(8)]
        found = await asyncio.gather(*slow, return_exceptions=True)
        assert_429(found, {TURN_NEVER_CAME, HAD_NO_CORE})
        pool.stop()

    asyncio.run(scene())


@pytest.mark.usefixtures("_server")
def test_a_slow_grammar_whose_turn_does_not_come_may_be_sent_again() -> None:
    """It was not tried, so that nothing is known of it."""

    async def scene() -> None:
        asked, pool = scripted(3.0)
        slow = [asyncio.create_task(check(asked, f"sleep 60.{n}")) for n in range(3)]
        found = await asyncio.gather(*slow, return_exceptions=True)
        assert_429(found, {TURN_NEVER_CAME, HAD_NO_CORE})
        pool.stop()

    asyncio.run(scene())


@pytest.mark.parametrize(
    "grammar",
    [
        {"regex": "a" * MAX_GRAMMAR_BYTES},
        {"json": {"enum": list(range(MAX_GRAMMAR_BYTES))}},
    ],
    ids=["text", "items"],
)
def test_a_grammar_that_is_too_large_reaches_no_worker(grammar: dict[str, Any]) -> None:
    """Nor is all of it made into text for that."""

    async def scene() -> None:
        asked, pool = scripted()
        with pytest.raises(VLLMValidationError, match="larger than"):
            await asked.check(StructuredOutputsParams(**grammar))
        assert not pool.processes()

    asyncio.run(scene())


@pytest.mark.usefixtures("_server")
def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest result goes first."""
    monkeypatch.setattr(checker, "MAX_RESULTS", 2)

    async def scene() -> None:
        asked, pool = scripted()
        for what in ("a", "b", "c"):
            await check(asked, what)
        assert len(asked._results) == 2
        pool.stop()

    asyncio.run(scene())


@pytest.mark.usefixtures("_server")
def test_the_memory_of_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long list of choices is tried once, too, and the oldest result goes first."""
    monkeypatch.setattr(checker, "MAX_REMEMBERED_BYTES", 50_000)

    async def scene() -> None:
        asked, pool = scripted()
        for what in ("change 20000", "change 20001", "change 20002"):
            await check(asked, what)
        lengths = [len(result.changed["grammar"]) for result in asked._results.values()]
        assert lengths == [20001, 20002]
        await check(asked, "change 20001")
        assert asked._remembered_bytes == sum(lengths)
        pool.stop()

    asyncio.run(scene())


# What vLLM compiles before


def test_a_format_beside_tools_is_checked_before_a_parser_sees_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's parsers of tools have xgrammar compile it in the front end."""
    assert "validate_xgrammar_grammar" in inspect.getsource(abstract_parser._xgrammar_supports)
    seen: list[Any] = []

    async def preprocess_chat(_self: Any, request: Any, **_options: Any) -> None:
        seen.append(request)

    class Refusing(GrammarChecker):
        async def check(self, constraint: StructuredOutputsParams) -> None:
            raise VLLMValidationError(str(constraint.json))

    validate = backend_xgrammar.validate_xgrammar_grammar
    monkeypatch.setattr(backend_xgrammar, "validate_xgrammar_grammar", validate)  # put back later
    monkeypatch.setattr(OnlineRenderer, "preprocess_chat", preprocess_chat)
    asked, _ = scripted()
    asked.__class__ = Refusing
    check_in_workers(asked)
    schema = {"name": "x", "schema": PERSON}
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": PERSON}}]
    renderer = object.__new__(OnlineRenderer)
    cohere = type("CohereCommandParser", (), {"__module__": "vllm.parser.cohere_command"})
    source = Path(abstract_parser.__file__).with_name("cohere_command.py").read_text()
    assert "xgr.Grammar.from_json_schema(" in source

    async def scene() -> None:
        await renderer.preprocess_chat(ChatCompletionRequest(**body))
        assert len(seen) == 1
        with pytest.raises(VLLMValidationError, match="age"):
            await renderer.preprocess_chat(ChatCompletionRequest(**body, tools=tools))
        plain = {"messages": body["messages"], "tools": tools}
        with pytest.raises(VLLMValidationError, match="age"):
            await renderer.preprocess_chat(ChatCompletionRequest(**plain), parser=cohere)
        await renderer.preprocess_chat(ChatCompletionRequest(**plain))
        assert len(seen) == 2
        await renderer.preprocess_chat(TokenizeChatRequest(messages=body["messages"], tools=tools))
        assert len(seen) == 3

    asyncio.run(scene())


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": tagged(with_pattern(DEEP))},
        {"structured_outputs": {"structural_tag": json.dumps(tagged(with_pattern(DEEP)))}},
    ],
    ids=["format", "tag"],
)
@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest])
def test_the_type_of_a_request_gives_no_tag_to_native_code(
    kind: type, body: dict[str, Any]
) -> None:
    """It would end this process: the worker is given it, and ends."""
    whole = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"} | body
    pid = os.fork()
    if not pid:
        backend_xgrammar.validate_xgrammar_grammar = validate_without_xgrammar
        kind(**whole)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize(
    "tag",
    [
        "[]",
        "{",
        json.dumps({"type": "structural_tag", "format": {"type": "nonsense"}}),
        json.dumps({"structures": [{"begin": "a"}], "triggers": ["a"]}),
    ],
)
def test_a_wrong_tag_is_still_refused_at_once(tag: str) -> None:
    """As far as it can be told without native code."""
    parameters = SamplingParams(structured_outputs=StructuredOutputsParams(structural_tag=tag))
    with pytest.raises(VLLMValidationError):
        validate_without_xgrammar(parameters)


def test_the_hostile_grammars_of_the_soak_are_tried() -> None:
    """None is refused by its length alone, and those of rules and lists are nearly as long."""
    asked: list[StructuredOutputsParams] = []

    class Listener(Target):
        async def complete(self, options: Mapping[str, Any], *_: Any, **__: Any) -> str:
            asked.append(StructuredOutputsParams(**options["structured_outputs"]))
            return "400"

    async def scene() -> None:
        listener = Listener(0, "", "", Random(0), 0.0)
        for attack in (
            hostile_grammars.chained_rules,
            hostile_grammars.many_alternatives,
            hostile_grammars.many_choices,
        ):
            await attack(listener)

    asyncio.run(scene())
    sizes = [len(grammar_text(one)) for one in asked]
    assert len(sizes) == 4
    assert min(sizes) > MAX_GRAMMAR_BYTES / 2


# What the engine gives up


def output(finish_reason: str | None, *stop_reasons: str) -> Any:
    answers = [
        SimpleNamespace(finish_reason=finish_reason, stop_reason=reason, token_ids=[7, 7])
        for reason in stop_reasons or (None,)
    ]
    return SimpleNamespace(prompt_token_ids=[1, 2, 3], outputs=answers)


@pytest.mark.parametrize("reason", [TOO_SLOW, TOO_LARGE])
def test_a_grammar_that_an_engine_gives_up_is_the_fault_of_the_client(reason: str) -> None:
    """The request is left, and the grammar is refused from then on."""
    seen: list[str] = []

    async def outputs() -> AsyncIterator[Any]:
        try:
            yield output(None)
            yield output("error", reason)
            yield output(None)
        finally:
            seen.append("left")

    async def scene() -> None:
        answer = refusing(outputs(), lambda: seen.append("refused"))
        await anext(answer)
        with pytest.raises(VLLMValidationError, match="grammar of the request is refused"):
            await anext(answer)

    asyncio.run(scene())
    assert seen == ["refused", "left"]


@pytest.mark.parametrize("other", [NO_ROOM, HAD_NO_TIME, DEAD_END])
def test_a_grammar_that_is_too_slow_is_refused_whatever_ends_its_other_answers(other: str) -> None:
    """The answers of a request take time from each other."""
    seen: list[str] = []

    async def outputs() -> AsyncIterator[Any]:
        yield output("error", other, TOO_SLOW, other)

    async def scene() -> None:
        with pytest.raises(VLLMValidationError, match="too much CPU time"):
            await anext(refusing(outputs(), lambda: seen.append("refused")))

    asyncio.run(scene())
    assert seen == ["refused"]


@pytest.mark.parametrize(
    "reason", [DEAD_END, TOO_SLOW, NO_ROOM, NOT_COMPILED, COMPILES_TOO_LONG, HAD_NO_TIME]
)
@pytest.mark.parametrize(
    ("begins", "has_begun", "counted"), [(0, False, (3, 2)), (1, False, (0, 2)), (0, True, (0, 2))]
)
def test_what_was_made_for_a_grammar_that_is_given_up_is_counted(
    begins: int, has_begun: bool, counted: tuple[int, int], reason: str
) -> None:
    """Its caller gets nothing of it; a prompt counts with the first output."""
    context = RequestContext()

    async def outputs() -> AsyncIterator[Any]:
        for _ in range(begins):
            yield output(None)
        yield output("error", reason)

    async def scene() -> None:
        REQUEST.set(context)
        answer = refusing(outputs(), lambda: None, has_begun=has_begun)
        with pytest.raises((VLLMValidationError, GracefulHTTPError)):
            _ = [one async for one in answer]

    asyncio.run(scene())
    assert (context.prompt_tokens, context.output_tokens) == counted


@pytest.mark.parametrize(
    ("reason", "error", "message"),
    [
        (NO_ROOM, GracefulHTTPError, "too much memory"),
        (NOT_COMPILED, GracefulHTTPError, "too long"),
        (COMPILES_TOO_LONG, GracefulHTTPError, "too busy"),
        (HAD_NO_TIME, GracefulHTTPError, "no time"),
        (DEAD_END, VLLMValidationError, "allows no token"),
    ],
    ids=["made-room", "had-no-turn", "was-not-compiled", "was-late", "leads-nowhere"],
)
def test_a_grammar_may_be_sent_again_after_one_answer_of_it_ended(
    reason: str, error: type[Exception], message: str
) -> None:
    """It is not refused from then on: there is room later, or another answer gets further."""

    async def outputs() -> AsyncIterator[Any]:
        yield output("error", reason)

    async def scene() -> None:
        with pytest.raises(error, match=message):
            await anext(refusing(outputs(), pytest.fail))

    asyncio.run(scene())


@pytest.mark.parametrize("reason", [NO_ROOM, NOT_COMPILED, COMPILES_TOO_LONG, HAD_NO_TIME])
def test_a_grammar_for_which_others_leave_no_room_is_a_429(reason: str) -> None:
    """Which says that the client may send it again."""
    context = RequestContext()

    async def outputs() -> AsyncIterator[Any]:
        yield output("error", reason)

    async def scene() -> None:
        REQUEST.set(context)
        with pytest.raises(GracefulHTTPError) as refused:
            await anext(refusing(outputs(), pytest.fail))
        assert refused.value.http_status == HTTPStatus.TOO_MANY_REQUESTS

    asyncio.run(scene())
    assert context.may_be_retried is True


def test_another_error_of_an_engine_is_left_to_vllm() -> None:
    """It accuses no grammar."""

    async def outputs() -> AsyncIterator[Any]:
        yield output("error")

    async def scene() -> list[Any]:
        return [one async for one in refusing(outputs(), pytest.fail)]

    assert len(asyncio.run(scene())) == 1


@pytest.mark.usefixtures("_server")
@pytest.mark.parametrize("wanted", [{"regex": "[a-z]+"}, {"choice": ["yes", "no"]}])
def test_a_grammar_that_was_given_up_is_refused(config: Any, wanted: dict[str, Any]) -> None:
    """Before it reaches an engine again, whatever a worker says of it."""

    async def scene() -> None:
        asked = grammar_checker(config, DEADLINE_SECONDS)
        given_up = StructuredOutputsParams(**wanted)
        await asked.check(given_up)
        asked.refuse(given_up)
        with pytest.raises(VLLMValidationError, match="too much CPU time"):
            await asked.check(StructuredOutputsParams(**wanted))
        await asked.check(StructuredOutputsParams(regex="[0-9]+"))
        asked._pool.stop()

    asyncio.run(scene())
