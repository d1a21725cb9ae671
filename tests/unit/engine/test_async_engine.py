"""What operators have an engine do, and its adapters, over a scripted AsyncLLM."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest
from vllm.exceptions import VLLMNotFoundError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError

from holdfast.engine import loras, maintenance, worker_adapters
from holdfast.engine.async_engine import AsyncEngine
from holdfast.engine.checked_llm import UnsentError
from holdfast.engine.loras import Loras
from holdfast.engine.maintenance import Maintenance
from holdfast.engine.proxy import EngineProxy
from holdfast.engine.requests.sequence_queue import Capacity, SequenceQueue
from holdfast.errors import (
    ConflictError,
    EngineLostError,
    EngineRefusedError,
    EngineSilentError,
    NotFoundError,
    UsageError,
)
from holdfast.labels import SLEEP_TAGS
from holdfast.nodes.remote_ranks import RemoteRanks
from holdfast.patches.stat_logger import Queues
from holdfast.processes.deaths import CoreProcess
from holdfast.records import Death, Lora
from holdfast.request_context import REQUEST, RequestContext
from holdfast.worker import rpc
from holdfast.workspace.plan import WorkspaceSpec
from scripted_capacity import ScriptedCapacity
from stub_engine import FACTS

COMPILER_BYTES = 256 << 20
"""Far more than a process that does nothing."""
PROFILED = replace(FACTS, has_profiler=True)


class ScriptedLLM:
    """Notes what it is asked, and answers or fails as told."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.errors: dict[str, str] = {}
        """Why the first worker cannot do a thing."""
        self.broken_paths: dict[str, int] = {}
        """Of adapters, with the number of workers, out of two, that cannot load them."""
        self.raised: Exception | None = None
        self.is_silent = False
        self.is_cache_free = True
        self.sequences: SequenceQueue | None = None
        self.on_sleep: Callable[[], None] = lambda: None

    async def _ask(self, what: Any) -> None:
        self.asked.append(what)
        if self.is_silent:
            await asyncio.Event().wait()
        if self.raised is not None:
            raise self.raised

    async def collective_rpc(self, method: str, *, args: Any) -> list[dict[str, str]]:
        assert method == "holdfast_call"
        await self._ask(args)
        failing = self.broken_paths.get(args[1].get("lora_path"), 0)
        return [
            {"error": "ValueError: broken" if worker < failing else own_error}
            for worker, own_error in enumerate((self.errors.get(args[0], ""), ""))
        ]

    async def sleep(self, level: int, *, mode: str) -> None:
        await self._ask(("sleep", level, mode))
        self.on_sleep()

    async def wake_up(self, tags: list[str]) -> None:
        await self._ask(("wake", tags))

    async def start_profile(self, prefix: str | None) -> None:
        await self._ask(("profile", prefix))

    async def stop_profile(self) -> None:
        await self._ask("profile ends")

    async def reset_prefix_cache(self) -> bool:
        await self._ask("prefix")
        return self.is_cache_free

    async def reset_mm_cache(self) -> None:
        await self._ask("mm")

    async def reset_encoder_cache(self) -> None:
        await self._ask("encoder")


class CoreOf:
    """As much of an AsyncLLM as tells which process is its core."""

    errored = False

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def core_processes(self) -> Mapping[int, CoreProcess]:
        return {self._pid: CoreProcess("EngineCore", lambda: None)}


class PausingCore(CoreOf):
    """It pauses when asked to, and replies when a test says so."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        self.asked: list[str] = []
        self.replies = asyncio.Event()

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.asked.append(f"pause, {mode=}, {clear_cache=}")
        await self.replies.wait()

    async def resume_generation(self) -> None:
        self.asked.append("resume")


@contextmanager
def holding(size_bytes: int) -> Iterator[int]:
    """Run a process that holds this much memory, and return its pid."""
    program = f"import sys; held = b'x' * {size_bytes}; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"\n"
        yield child.pid


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """What it comes to, in time."""
    return asyncio.run(asyncio.wait_for(work, 60))


def test_a_sleeping_engine_rests_until_all_of_it_is_awake() -> None:
    """Only what sleeps is woken: vLLM wakes nothing if one of the tags is awake."""
    llm = ScriptedLLM()
    engine = Maintenance(llm, FACTS)

    async def live() -> None:
        await engine.sleep(1)
        assert engine.stops_steps
        assert await engine.wake(frozenset({"weights"})) == {"kv_cache"}
        assert engine.stops_steps
        assert await engine.wake(frozenset({"weights"})) == {"kv_cache"}
        assert await engine.wake(SLEEP_TAGS) == frozenset()
        assert not engine.stops_steps

    run(live())
    assert llm.asked == [("sleep", 1, "abort"), ("wake", ["weights"]), ("wake", ["kv_cache"])]


def test_a_request_on_trial_is_not_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM does that for the client of a transcription that leaves; the others are aborted."""
    asked: list[list[str]] = []

    class Engine:
        async def abort(self, names: list[str]) -> None:
            asked.append(names)

    proxy = EngineProxy()
    proxy._current = Engine()
    monkeypatch.setattr(proxy.requests, "is_suspect", lambda name: name == "tried")
    run(proxy.abort(["tried", "other"]))
    assert asked == [["other"]]


def test_a_client_aborts_nothing_that_another_has_named_alike() -> None:
    """vLLM aborts a transcription by the ID of its client; an operator may abort anything."""
    asked: list[list[str]] = []

    class Engine:
        async def abort(self, names: list[str]) -> None:
            asked.append(names)

    async def live() -> None:
        proxy, tasks = EngineProxy(), []
        first, second = (RequestContext(capacity=ScriptedCapacity()) for _ in range(2))
        for context in (first, second):
            REQUEST.set(context)
            tasks.append(asyncio.create_task(use(proxy, {"prompt": "a", "request_id": "a"})))
        while proxy.requests.held < 2:  # noqa: ASYNC110 - the loop is all there is
            await asyncio.sleep(0)
        proxy._current = Engine()
        for context in (second, first, RequestContext()):
            REQUEST.set(context)
            await proxy.abort("a")
        tasks[1].cancel()
        await asyncio.wait(tasks)
        with pytest.raises(Exception, match="was aborted while it waited"):
            await tasks[0]

    run(live())
    assert asked == [[], ["a"], ["a"]]


@pytest.mark.parametrize(
    ("method", "arguments", "has_new_weights"),
    [
        ("collective_rpc", ("reload_weights",), True),
        ("collective_rpc", ("holdfast_set_growth",), False),
        ("update_weights", ("request",), True),
    ],
)
def test_what_may_change_the_weights_is_known_until_the_next_engine(
    method: str, arguments: tuple[str, ...], *, has_new_weights: bool
) -> None:
    """The next one has those of the files."""

    class Engine:
        vllm_config = model_config = renderer = input_processor = None

        async def collective_rpc(self, _method: str) -> None:
            pass

        async def update_weights(self, _request: str) -> None:
            pass

    proxy = EngineProxy()
    proxy.use(Engine())
    run(getattr(proxy, method)(*arguments))
    assert proxy.has_new_weights is has_new_weights
    proxy.use(Engine())
    assert not proxy.has_new_weights


async def use(proxy: EngineProxy, arguments: dict[str, Any]) -> None:
    """A request, to the end of its answer."""
    async for _ in proxy.requests.run("generate", arguments):
        pass


def test_a_request_that_waits_for_an_engine_can_be_aborted() -> None:
    """Its client gets an error, and no engine the request."""
    proxy = EngineProxy()

    async def live() -> None:
        aborted, other = (
            asyncio.create_task(use(proxy, {"prompt": name, "request_id": name}))
            for name in ("aborted", "other")
        )
        while proxy.requests.held < 2:  # noqa: ASYNC110 - the loop is all there is
            await asyncio.sleep(0)
        await proxy.abort("aborted")
        with pytest.raises(Exception, match="was aborted while it waited"):
            await aborted
        assert proxy.requests.held == 1
        other.cancel()

    run(live())


def test_weights_of_level_two_are_read_again_before_vllm_schedules() -> None:
    """vLLM leaves them empty, and schedules once all memory is back; it would answer nonsense."""
    llm = ScriptedLLM()
    engine = Maintenance(llm, FACTS)

    async def live() -> None:
        await engine.sleep(2)
        assert await engine.wake(SLEEP_TAGS) == frozenset()

    run(live())
    assert llm.asked[1:] == [
        ("wake", ["weights"]),
        ("reload_weights", {}),
        ("wake", ["kv_cache"]),
    ]
    assert engine.has_discarded_weights


def test_a_queued_sequence_does_not_get_into_an_engine_that_sleeps() -> None:
    """Its abort of those that it has makes room for others; it would run them on waking."""
    llm = ScriptedLLM()
    engine = Maintenance(llm, FACTS)

    async def live() -> None:
        llm.sequences = sequences = SequenceQueue(Capacity(1, 1), lambda: 2)
        llm.on_sleep = lambda: sequences.leave("first")
        for name in ("first", "second"):
            sequences.register(name, RequestContext(key="a"))
        assert await sequences.enter("first")
        waiting = asyncio.create_task(sequences.enter("second"))
        await asyncio.sleep(0)
        await engine.sleep(1)
        with pytest.raises(UnsentError):
            await waiting
        sequences.leave("second")
        sequences.register("third", RequestContext(key="a"))
        with pytest.raises(UnsentError):
            await sequences.enter("third")
        await engine.wake(SLEEP_TAGS)
        assert await sequences.enter("third")

    run(live())


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (EngineDeadError(), EngineLostError),
        (Exception("Call to sleep method failed: no memory"), EngineRefusedError),
    ],
)
def test_what_vllm_raises_is_ours(raised: Exception, error: type[Exception]) -> None:
    """A failed RPC is a bare Exception there."""
    llm = ScriptedLLM()
    llm.raised = raised
    with pytest.raises(error):
        run(Maintenance(llm, FACTS).sleep(1))


def test_an_engine_that_does_not_answer_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a deadline of ours."""
    monkeypatch.setattr(maintenance, "SLEEP_DEADLINE_SECONDS", 0.01)
    llm = ScriptedLLM()
    llm.is_silent = True
    with pytest.raises(EngineSilentError, match="did not fall asleep"):
        run(Maintenance(llm, FACTS).sleep(1))


def test_a_profile_needs_a_profiler() -> None:
    """Without one it is a conflict, with the flag."""
    llm = ScriptedLLM()
    for work in (
        Maintenance(llm, FACTS).start_profile(None),
        Maintenance(llm, FACTS).stop_profile(),
    ):
        with pytest.raises(ConflictError) as caught:
            run(work)
        assert "--profiler-config" in caught.value.remedy
    run(Maintenance(llm, PROFILED).start_profile("evening"))
    assert llm.asked == [("profile", "evening")]


def test_a_cache_in_use_is_a_conflict() -> None:
    """vLLM says so by a False that nobody reads."""
    llm = ScriptedLLM()
    run(Maintenance(llm, FACTS).reset_caches(frozenset({"mm", "encoder"})))
    llm.is_cache_free = False
    llm.asked.clear()
    with pytest.raises(ConflictError, match="prefix cache is in use"):
        run(Maintenance(llm, FACTS).reset_caches(frozenset({"encoder", "mm", "prefix"})))
    assert llm.asked == ["prefix"]  # nothing else has changed


def test_state_is_saved_by_every_worker() -> None:
    """One that fails says why, and that no step ended meanwhile is not a stall."""
    llm = ScriptedLLM()
    engine = Maintenance(llm, FACTS)
    run(engine.save_sharded_state("/out", pattern=None, max_size_bytes=7))
    assert llm.asked == [("save_sharded_state", {"path": "/out", "pattern": None, "max_size": 7})]
    llm.errors["save_sharded_state"] = "OSError: no space"
    with pytest.raises(EngineRefusedError, match="could not save its state: OSError: no space"):
        run(engine.save_sharded_state("/out", pattern=None, max_size_bytes=None))
    assert not engine.stops_steps


class Models:
    """vLLM's serving models, as far as adapters go: the list, and the call of the engine."""

    def __init__(self, proxy: EngineProxy) -> None:
        self.lora_requests: dict[str, LoRARequest] = {}
        self.refusal: Any | None = None
        self._proxy = proxy

    async def load_lora_adapter(self, request: LoadLoRAAdapterRequest) -> Any:
        if self.refusal is not None:
            return self.refusal
        earlier = self.lora_requests.get(request.lora_name)
        number = len(self.lora_requests) + 1 if earlier is None else earlier.lora_int_id
        lora = LoRARequest(request.lora_name, number, request.lora_path)
        lora.load_inplace = request.load_inplace
        await self._proxy.add_lora(lora)
        self.lora_requests[request.lora_name] = lora
        return "Success"

    async def unload_lora_adapter(self, request: Any) -> str:
        del self.lora_requests[request.lora_name]
        return "Success"


class Shelf:
    """Adapters in front of a scripted engine."""

    def __init__(self, *, is_enabled: bool = True) -> None:
        self.llm = ScriptedLLM()
        self.proxy = EngineProxy()
        self.proxy._current = self.llm
        self.loras = Loras(self.proxy, is_enabled=is_enabled)
        self.models = Models(self.proxy)
        self.loras.attach(self.models)

    def load(self, *names: str) -> None:
        """Load adapters."""
        for name in names:
            run(self.loras.load(name, f"/{name}", is_replacing=False))


def test_adapters_outlive_the_engine_and_stay_pinned() -> None:
    """The next engine gets all of them in the old order; what it does not take is unlisted."""
    shelf = Shelf()
    shelf.load("a", "b")
    run(shelf.loras.pin("b"))
    shelf.llm.asked.clear()
    run(shelf.loras.restore())
    assert [(what, its.get("lora_name", its.get("lora_id"))) for what, its in shelf.llm.asked] == [
        ("add_lora", "a"),
        ("add_lora", "b"),
        ("pin_lora", 2),
    ]
    shelf.llm.errors["add_lora"] = "FileNotFoundError: it is gone"
    run(shelf.loras.restore())
    assert shelf.loras.listed() == ()


def test_an_engine_that_dies_while_it_gets_its_adapters_costs_none() -> None:
    """The next one gets them."""
    shelf = Shelf()
    shelf.load("a")
    shelf.llm.raised = EngineDeadError()
    run(shelf.loras.restore())
    assert shelf.loras.listed() == (Lora("a", "/a", is_pinned=False),)


def test_an_adapter_that_one_worker_does_not_take_is_in_none() -> None:
    """It is taken from the others again."""
    shelf = Shelf()
    shelf.llm.errors["add_lora"] = "ValueError: rank 64"
    with pytest.raises(EngineRefusedError, match="rank 64"):
        shelf.load("a")
    assert [what for what, _ in shelf.llm.asked] == ["add_lora", "remove_lora"]
    assert shelf.loras.listed() == ()


def test_an_adapter_whose_replacement_no_worker_takes_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They have it still, so nothing is asked of them, and its requests go on."""
    shelf = Shelf()
    shelf.load("a")
    run(shelf.loras.pin("a"))
    shelf.llm.asked.clear()
    shelf.llm.broken_paths["/b"] = 2
    with pytest.raises(EngineRefusedError, match="broken"):
        run(shelf.loras.load("a", "/b", is_replacing=True))
    assert [what for what, _ in shelf.llm.asked] == ["add_lora"]
    assert shelf.loras.listed() == (Lora("a", "/a", is_pinned=True),)
    assert caplog.text == ""


def test_an_adapter_whose_replacement_one_worker_does_not_take_is_loaded_again() -> None:
    """Into all, since the other one has given it up."""
    shelf = Shelf()
    shelf.load("a")
    shelf.llm.asked.clear()
    shelf.llm.broken_paths["/b"] = 1
    with pytest.raises(EngineRefusedError, match="broken"):
        run(shelf.loras.load("a", "/b", is_replacing=True))
    asked = [(what, its["lora_path"], its["load_inplace"]) for what, its in shelf.llm.asked]
    assert asked == [("add_lora", "/b", True), ("add_lora", "/a", True)]
    assert shelf.loras.listed() == (Lora("a", "/a", is_pinned=False),)


def test_an_adapter_that_cannot_be_loaded_again_is_served_no_more() -> None:
    """A step of a request with it would end the engine, and the next one's, too."""
    shelf = Shelf()
    shelf.load("a")
    shelf.llm.broken_paths |= {"/a": 1, "/b": 1}
    arguments = {"prompt": "hello", "lora_request": shelf.models.lora_requests["a"]}

    async def live() -> None:
        using = asyncio.create_task(use(shelf.proxy, arguments))
        await asyncio.sleep(0)
        with pytest.raises(EngineRefusedError, match="broken"):
            await shelf.loras.load("a", "/b", is_replacing=True)
        with pytest.raises(Exception, match="LoRA adapter a could not be loaded again"):
            await using

    run(live())
    assert shelf.llm.asked[-1] == ("remove_lora", {"lora_id": 1})
    assert shelf.loras.listed() == ()


def test_a_replaced_adapter_is_read_once() -> None:
    """vLLM keeps the record, and reads the files in each step as long as it says so."""
    shelf = Shelf()
    replaced = LoRARequest("a", 1, "/a", load_inplace=True)
    run(shelf.proxy.add_lora(replaced))
    assert shelf.llm.asked[-1][1]["load_inplace"]
    assert not replaced.load_inplace


def test_an_adapter_that_was_not_loaded_again_has_not_changed(tmp_path: Path) -> None:
    """Its streams go on with what the workers have."""
    shelf = Shelf()
    directory = tmp_path / "a"
    directory.mkdir()
    (directory / "adapter_config.json").write_text("{}")
    adapter = LoRARequest("a", 1, str(directory))
    arguments = {"prompt": "hello", "request_id": "a", "lora_request": adapter}

    async def live() -> None:
        await shelf.proxy.add_lora(adapter)
        using = asyncio.create_task(use(shelf.proxy, arguments))
        await asyncio.sleep(0)
        (request,) = shelf.proxy.requests._requests
        request.has_yielded = True
        shelf.llm.broken_paths["/typo"] = 1
        with pytest.raises(EngineRefusedError):
            await shelf.proxy.add_lora(LoRARequest("a", 1, "/typo", load_inplace=True))
        await shelf.proxy.add_lora(adapter)
        assert request.refusal is None
        (directory / "adapter_config.json").write_text("{ }")
        await shelf.proxy.add_lora(adapter)
        assert [one.refusal is None for one in shelf.proxy.requests._requests] == [False]
        using.cancel()

    run(live())


def test_only_the_adapter_that_was_pinned_is_pinned_again() -> None:
    """An earlier one of its name, which a request still uses, has no route to unpin it."""
    shelf = Shelf()
    shelf.load("a")
    earlier = shelf.models.lora_requests["a"]
    shelf.models.lora_requests["a"] = LoRARequest("a", 2, "/a")
    run(shelf.loras.pin("a"))
    arguments = {"prompt": "hello", "request_id": "a", "lora_request": earlier}

    async def live() -> None:
        using = asyncio.create_task(use(shelf.proxy, arguments))
        await asyncio.sleep(0)
        shelf.llm.asked.clear()
        await shelf.loras.restore()
        using.cancel()

    run(live())
    assert [(what, its["lora_id"]) for what, its in shelf.llm.asked if what == "pin_lora"] == [
        ("pin_lora", 2)
    ]


def test_an_adapter_that_vllms_routes_have_loaded_again_is_not_pinned() -> None:
    """Nor by the next engine. The one that was pinned leaves before another can be."""
    shelf = Shelf()
    shelf.load("a")
    run(shelf.loras.pin("a"))
    shelf.models.lora_requests["a"] = LoRARequest("a", 2, "/a")
    assert shelf.loras.listed() == (Lora("a", "/a", is_pinned=False),)
    shelf.llm.asked.clear()
    run(shelf.loras.restore())
    assert [what for what, _ in shelf.llm.asked] == ["add_lora"]
    run(shelf.loras.pin("a"))
    assert shelf.llm.asked[1:] == [("remove_lora", {"lora_id": 1}), ("pin_lora", {"lora_id": 2})]
    assert shelf.loras.listed() == (Lora("a", "/a", is_pinned=True),)


def test_a_replaced_adapter_stays_pinned() -> None:
    """As in the workers, where it has the same ID."""
    shelf = Shelf()
    shelf.load("a")
    run(shelf.loras.pin("a"))
    replaced = run(shelf.loras.load("a", "/b", is_replacing=True))
    assert replaced == Lora("a", "/b", is_pinned=True)


def test_a_pin_too_many_is_a_conflict() -> None:
    """The adapter is not pinned, and served as before."""
    shelf = Shelf()
    shelf.load("a")
    shelf.llm.errors["pin_lora"] = "RuntimeError: All items are pinned"
    with pytest.raises(ConflictError) as caught:
        run(shelf.loras.pin("a"))
    assert "--max-loras" in caught.value.remedy
    assert not shelf.loras.listed()[0].is_pinned


def test_a_pin_that_is_lost_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The adapter is served all the same."""
    shelf = Shelf()
    shelf.load("a")
    run(shelf.loras.pin("a"))
    shelf.llm.errors["pin_lora"] = "RuntimeError: no room"
    with caplog.at_level(logging.ERROR):
        run(shelf.loras.restore())
    assert shelf.loras.listed() == (Lora("a", "/a", is_pinned=False),)
    assert "LoRA a is no longer pinned" in caplog.text


def test_an_adapter_is_taken_from_the_engine_when_nobody_uses_it() -> None:
    """A step that finds it gone would load it again, or end the engine."""
    shelf = Shelf()
    shelf.load("a")
    arguments = {"prompt": "hello", "lora_request": shelf.models.lora_requests["a"]}

    async def live() -> None:
        using = asyncio.create_task(use(shelf.proxy, arguments))  # it waits for an engine
        await asyncio.sleep(0)
        unloading = asyncio.create_task(shelf.loras.unload("a"))
        while shelf.loras.listed():  # noqa: ASYNC110 - the loop is all there is
            await asyncio.sleep(0)
        assert [what for what, _ in shelf.llm.asked] == ["add_lora"]
        using.cancel()
        await unloading

    run(live())
    assert shelf.llm.asked[-1] == ("remove_lora", {"lora_id": 1})


class SlowChecker:
    """Checks a grammar for as long as a test says."""

    def __init__(self) -> None:
        self.began, self.goes_on = asyncio.Event(), asyncio.Event()

    async def check(self, _constraint: Any) -> None:
        self.began.set()
        await self.goes_on.wait()


def asking(shelf: Shelf, lora: LoRARequest) -> AsyncGenerator[Any, None]:
    """A request of a client that uses an adapter, and a grammar."""
    parameters = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    outputs = shelf.proxy.generate({}, parameters, "r", lora_request=lora)
    return cast("AsyncGenerator[Any, None]", outputs)


@pytest.mark.parametrize("has_begun", [False, True])
def test_an_adapter_is_used_before_the_engine_has_the_request(*, has_begun: bool) -> None:
    """While its grammar is checked, and before its route asks for the first output."""
    shelf = Shelf()
    shelf.load("a")
    lora = shelf.models.lora_requests["a"]

    async def live() -> None:
        checker: Any = SlowChecker()
        shelf.proxy.grammars = checker
        outputs = asking(shelf, lora)
        begun = asyncio.ensure_future(anext(outputs)) if has_begun else None
        if begun is not None:
            await checker.began.wait()
        unloading = asyncio.create_task(shelf.loras.unload("a"))
        await asyncio.sleep(0.05)
        assert [what for what, _ in shelf.llm.asked] == ["add_lora"]
        await shelf.loras.restore()
        assert [what for what, _ in shelf.llm.asked] == ["add_lora", "add_lora"]
        if begun is not None:
            begun.cancel()
            await asyncio.wait({begun})
        await outputs.aclose()
        await unloading

    run(live())
    assert shelf.llm.asked[-1] == ("remove_lora", {"lora_id": 1})


def test_an_adapter_that_is_gone_once_a_grammar_is_checked_is_in_no_step() -> None:
    """It may be lost with an engine that dies during the check."""
    shelf = Shelf()
    shelf.load("a")
    lora = shelf.models.lora_requests["a"]

    class Losing:
        async def check(self, _constraint: object) -> None:
            shelf.proxy.adapters._loaded.clear()

    checker: Any = Losing()
    shelf.proxy.grammars = checker
    with pytest.raises(VLLMNotFoundError, match="The model `a` does not exist"):
        run(anext(asking(shelf, lora)))


def test_a_request_with_an_adapter_that_the_workers_no_longer_have_is_refused() -> None:
    """As one for an unknown model. A response that calls tools finds its adapter only once."""
    shelf = Shelf()
    shelf.load("a")
    lora = shelf.models.lora_requests["a"]
    run(shelf.loras.unload("a"))
    with pytest.raises(VLLMNotFoundError, match="The model `a` does not exist"):
        asking(shelf, lora)
    shelf.proxy.use(None)
    asking(shelf, lora)  # the next engine loads it, or refuses the request


def test_an_adapter_that_is_used_for_long_leaves_the_next_engine_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The call does not wait for that."""
    monkeypatch.setattr(loras, "UNUSED_DEADLINE_SECONDS", 0.01)
    shelf = Shelf()
    shelf.load("a")
    arguments = {"prompt": "hello", "lora_request": shelf.models.lora_requests["a"]}

    async def live() -> None:
        using = asyncio.create_task(use(shelf.proxy, arguments))
        await asyncio.sleep(0)
        await shelf.loras.unload("a")
        shelf.llm = ScriptedLLM()
        shelf.proxy._current = shelf.llm
        await shelf.loras.restore()
        using.cancel()
        while len(shelf.llm.asked) < 2:  # noqa: ASYNC110 - the loop is all there is
            await asyncio.sleep(0.01)

    run(live())
    assert [what for what, _ in shelf.llm.asked] == ["add_lora", "remove_lora"]


def test_an_adapter_without_an_engine_is_unloaded(caplog: pytest.LogCaptureFixture) -> None:
    """The next engine does not get it, and nobody is warned."""
    shelf = Shelf()
    shelf.load("a")
    shelf.llm.raised = EngineDeadError()
    run(shelf.loras.unload("a"))
    assert shelf.loras.listed() == ()
    assert caplog.text == ""


def test_a_request_whose_adapter_is_lost_is_told() -> None:
    """To try it would end one engine after the other."""
    shelf = Shelf()
    shelf.load("a")
    arguments = {"prompt": "hello", "lora_request": shelf.models.lora_requests["a"]}

    async def live() -> None:
        using = asyncio.create_task(use(shelf.proxy, arguments))
        await asyncio.sleep(0)
        shelf.llm.errors["add_lora"] = "FileNotFoundError: it is gone"
        await shelf.loras.restore()
        with pytest.raises(Exception, match="LoRA adapter a could not be loaded again"):
            await using

    run(live())


def test_an_adapter_that_is_unlisted_but_in_use_is_loaded_first() -> None:
    """Or the step that needs it would load it, and end the engine if its files are gone."""
    shelf = Shelf()
    shelf.load("a")
    unlisted = shelf.models.lora_requests.pop("a")
    arguments = {"prompt": "hello", "lora_request": unlisted}

    async def live() -> None:
        using = asyncio.create_task(use(shelf.proxy, arguments))
        await asyncio.sleep(0)
        shelf.llm.asked.clear()
        await shelf.loras.restore()
        assert [what for what, _ in shelf.llm.asked] == ["add_lora"]
        shelf.llm.errors["add_lora"] = "FileNotFoundError: it is gone"
        await shelf.loras.restore()
        with pytest.raises(Exception, match="LoRA adapter a could not be loaded again"):
            await using

    run(live())
    assert shelf.loras.listed() == ()


@pytest.mark.parametrize("has_changed", [False, True])
def test_a_stream_does_not_go_on_with_an_adapter_that_has_changed(
    tmp_path: Path, *, has_changed: bool
) -> None:
    """The rest of its answer would be that of other weights."""
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"0" * 8)
    shelf = Shelf()
    run(shelf.loras.load("a", str(tmp_path), is_replacing=False))
    arguments = {"prompt": "hello", "lora_request": shelf.models.lora_requests["a"]}

    async def live() -> None:
        using = asyncio.create_task(use(shelf.proxy, arguments))
        await asyncio.sleep(0)
        [request] = shelf.proxy.requests._requests
        request.has_yielded = True
        if has_changed:
            weights.write_bytes(b"1" * 9)
        await shelf.loras.restore()
        await asyncio.sleep(0)
        assert (request.refusal is not None) is has_changed
        using.cancel()

    run(live())


def test_adapters_need_the_flag_and_a_name() -> None:
    """A conflict, and 404."""
    with pytest.raises(ConflictError, match="LoRA is off"):
        Shelf(is_enabled=False).load("a")
    with pytest.raises(NotFoundError) as caught:
        run(Shelf().loras.pin("nobody"))
    assert "GET /admin/loras" in caught.value.remedy


def test_a_name_that_is_taken_is_a_conflict() -> None:
    """vLLM's advice names its own field, which the admin API has not; ours is `replace`."""
    shelf = Shelf()
    shelf.load("a")
    with pytest.raises(ConflictError, match="There is a LoRA adapter 'a' already") as caught:
        shelf.load("a")
    assert "`replace: true`" in caught.value.remedy
    assert [what for what, _ in shelf.llm.asked] == ["add_lora"]


def test_an_adapter_that_is_not_there_has_a_remedy() -> None:
    """The message is vLLM's."""
    from vllm.entrypoints.serve import create_error_response

    shelf = Shelf()
    shelf.models.refusal = create_error_response(
        "Loading lora a failed: No adapter found for /a", "NotFoundError", HTTPStatus.NOT_FOUND
    )
    with pytest.raises(NotFoundError, match="found for /a") as caught:
        shelf.load("a")
    assert "adapter_config.json" in caught.value.remedy


def test_what_vllm_says_no_to_is_the_callers_mistake() -> None:
    """Its own 500 for an adapter that does not load is one of ours with 400."""
    from vllm.entrypoints.serve import create_error_response

    shelf = Shelf()

    shelf.models.refusal = create_error_response("rank 64 is greater than max_lora_rank 16")
    with pytest.raises(UsageError, match="rank 64"):
        shelf.load("a")


class Worker:
    """A worker of vLLM's, and the wrapper around it."""

    def __init__(self) -> None:
        self.worker = self
        self.model_runner = SimpleNamespace()
        self.got: Any = None

    def add_lora(self, lora_request: LoRARequest) -> bool:
        self.got = lora_request
        return True

    def pin_lora(self, lora_id: int) -> bool:
        raise RuntimeError(f"no room for {lora_id}")


def test_a_worker_never_raises() -> None:
    """It answers with the error; what it is not asked for it does not do."""
    worker = Worker()
    fields = {"lora_name": "a", "lora_int_id": 3, "lora_path": "/a"}
    assert rpc.call(worker, "add_lora", fields) == {"error": ""}
    assert worker.got.lora_int_id == 3
    error = rpc.call(worker, "pin_lora", {"lora_id": 3})
    assert error == {"error": "RuntimeError: no room for 3"}
    assert "workers do not allow calls" in rpc.call(worker, "shutdown", {})["error"]


def engine_of(
    core: int,
    directory: Path,
    processes: Callable[[], frozenset[psutil.Process]],
    remote: RemoteRanks | None = None,
    loras: Loras | None = None,
    llm: CoreOf | None = None,
) -> AsyncEngine:
    """An engine with that core."""
    return AsyncEngine(
        llm or CoreOf(core),
        FACTS,
        WorkspaceSpec(str(directory), 1, 0, 0.1, "alongside", None),
        processes,
        Queues(),
        loras or Shelf().loras,
        remote=remote,
        limit_context=lambda _tokens: None,
    )


def test_stacks_of_processes_that_cannot_be_listed_are_no_error(tmp_path: Path) -> None:
    """A stall is told all the same, and its engine replaced, with too many open files here."""

    async def dumped(core: psutil.Process) -> str:
        listed = iter([frozenset({core})])

        def processes() -> frozenset[psutil.Process]:
            for found in listed:
                return found
            raise OSError("Too many open files")

        engine = engine_of(core.pid, tmp_path, processes)
        stacks = await engine.dump_stacks()
        engine._death.cancel()
        return stacks

    with holding(0) as pid:
        stacks = run(dumped(psutil.Process(pid)))
    assert stacks == "The stacks cannot be read: Too many open files"


def test_an_engine_whose_pause_is_cancelled_schedules_again(tmp_path: Path) -> None:
    """It is paused before it replies; without this, requests wait in it without end.

    Not before it has replied, since engines of a data-parallel group would refuse.
    """

    async def pause(engine: AsyncEngine) -> None:
        async with engine.scheduling_paused():
            pass

    async def cancel(core: psutil.Process) -> tuple[list[str], list[str], bool]:
        llm = PausingCore(core.pid)
        engine = engine_of(core.pid, tmp_path, lambda: frozenset({core}), llm=llm)
        pausing = asyncio.create_task(pause(engine))
        while not llm.asked:  # noqa: ASYNC110 - the loop is all there is
            await asyncio.sleep(0)
        pausing.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        before = [*llm.asked]
        llm.replies.set()
        await asyncio.wait({pausing})
        assert pausing.cancelled()
        engine._death.cancel()
        return before, llm.asked, engine.is_paused

    with holding(0) as pid:
        before, asked, is_paused = run(cancel(psutil.Process(pid)))
    asked_first = "pause, mode='keep', clear_cache=False"
    assert (before, asked, is_paused) == ([asked_first], [asked_first, "resume"], False)


@pytest.mark.parametrize("is_too_long", [False, True])
def test_no_step_is_expected_while_workers_load_an_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_too_long: bool
) -> None:
    """They make none until all have answered; an engine that never does is stalled in the end."""
    if is_too_long:
        monkeypatch.setattr(worker_adapters, "MAX_LOADING_SECONDS", 0.0)
    shelf = Shelf()

    async def seen(core: psutil.Process) -> list[bool]:
        engine = engine_of(core.pid, tmp_path, lambda: frozenset({core}), loras=shelf.loras)
        found = [engine.is_paused]
        shelf.llm.is_silent = True
        loading = asyncio.create_task(shelf.loras.load("a", "/a", is_replacing=False))
        while not shelf.llm.asked:  # noqa: ASYNC110 - the loop is all there is
            await asyncio.sleep(0.01)
        found.append(engine.is_paused)
        loading.cancel()
        await asyncio.wait({loading})
        engine._death.cancel()
        return [*found, engine.is_paused]

    with holding(0) as pid:
        assert run(seen(psutil.Process(pid))) == [False, not is_too_long, False]


def test_an_engine_that_dies_while_it_gets_its_adapters_is_not_waited_for(tmp_path: Path) -> None:
    """It answers nothing, and who watches for its death comes later."""
    shelf = Shelf()
    shelf.load("a")

    async def restore(core: psutil.Process) -> str:
        engine = engine_of(core.pid, tmp_path, lambda: frozenset({core}), loras=shelf.loras)
        shelf.llm.is_silent = True
        restoring = asyncio.create_task(engine.restore_adapters())
        while len(shelf.llm.asked) < 2:  # noqa: ASYNC110 - the loop is all there is
            await asyncio.sleep(0.01)
        core.kill()
        await restoring
        return (await engine.until_dead()).cause

    with holding(0) as pid:
        assert run(restore(psutil.Process(pid))) == "core_exit"
    assert not shelf.loras.stops_steps
    assert shelf.loras.listed() == (Lora("a", "/a", is_pinned=False),)


@pytest.mark.parametrize("is_there", [False, True])
def test_an_adapter_is_downloaded_before_the_workers_are_asked(
    monkeypatch: pytest.MonkeyPatch, *, is_there: bool
) -> None:
    """They make no step while they load it. If there is nothing to download, they say so."""
    asked, can_answer = threading.Event(), threading.Event()

    def download(path: str) -> str:
        asked.set()
        assert can_answer.wait(60)
        if is_there:
            return path
        raise FileNotFoundError(path)

    monkeypatch.setattr(worker_adapters, "get_adapter_absolute_path", download)
    shelf = Shelf()

    async def live() -> None:
        loading = asyncio.create_task(shelf.loras.load("a", "someone/a", is_replacing=False))
        while not asked.is_set():  # noqa: ASYNC110 - a thread sets it
            await asyncio.sleep(0.01)
        assert (shelf.llm.asked, shelf.loras.stops_steps) == ([], False)
        can_answer.set()
        await loading
        can_answer.clear()
        asked.clear()
        await shelf.loras.restore()  # which downloads nothing, with no client to wait for it

    run(live())
    assert [what for what, _ in shelf.llm.asked] == ["add_lora", "add_lora"]
    assert not asked.is_set()


def test_the_end_of_a_server_does_not_wait_for_a_download(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of a large adapter takes minutes, and cannot be cancelled."""
    asked, can_end, ended = threading.Event(), threading.Event(), threading.Event()

    def download(_path: str) -> None:
        asked.set()
        can_end.wait(10)
        ended.set()

    async def begin() -> None:
        runner_tasks.append(asyncio.create_task(shelf.loras.load("a", "a", is_replacing=False)))
        while not asked.is_set():  # noqa: ASYNC110 - a thread sets it
            await asyncio.sleep(0.01)

    monkeypatch.setattr(worker_adapters, "get_adapter_absolute_path", download)
    shelf, runner_tasks = Shelf(), list[asyncio.Task[Lora]]()
    with asyncio.Runner() as runner:
        runner.run(begin())
    was_waited_for = ended.is_set()
    can_end.set()
    assert not was_waited_for
    assert ended.wait(60)


def test_an_adapter_is_loaded_into_the_engine_that_is_there_after_its_download(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A download takes minutes, in which an engine may be replaced."""
    shelf, other = Shelf(), ScriptedLLM()

    def download(_path: str) -> None:
        shelf.proxy._current = other

    monkeypatch.setattr(worker_adapters, "get_adapter_absolute_path", download)
    shelf.load("a")
    assert (shelf.llm.asked, [what for what, _ in other.asked]) == ([], ["add_lora"])


def test_a_core_that_is_stopped_ends_an_engine_on_several_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other nodes wait for it; no request is blamed."""
    monkeypatch.setattr("holdfast.engine.async_engine.SILENCE_SECONDS", 0.0)

    async def death_of(core: psutil.Process) -> Death:
        remote = RemoteRanks(1, ("127.0.0.1", 20001), lambda: None)
        engine = engine_of(core.pid, tmp_path, lambda: frozenset({core}), remote)
        core.suspend()
        try:
            return await engine.until_dead()
        finally:
            core.resume()

    with holding(0) as pid:
        death = run(death_of(psutil.Process(pid)))
    assert (death.cause, death.blames_requests) == ("stall", False)
    assert death.reason.startswith(f"process {pid} was stopped by a signal")


def test_a_compiler_on_another_node_is_one_of_the_engine(tmp_path: Path) -> None:
    """No process here shows it."""

    async def seen(core: psutil.Process) -> list[bool]:
        remote = RemoteRanks(1, ("127.0.0.1", 20001), lambda: None)
        engine = engine_of(core.pid, tmp_path, lambda: frozenset({core}), remote)
        found = [engine.is_compiling()]
        remote.changed("b", (), is_compiling=True)
        engine._death.cancel()
        return [*found, engine.is_compiling()]

    with holding(0) as pid:
        assert run(seen(psutil.Process(pid))) == [False, True]


def test_a_scrape_looks_for_no_processes(tmp_path: Path) -> None:
    """A look for them is a walk over /proc; the memory is that of the core, known since the start.

    A compiler beside it does not count.
    """
    looks: list[int] = []

    async def measure(core: int, compiler: int) -> tuple[int | None, int]:
        def processes() -> frozenset[psutil.Process]:
            looks.append(1)
            return frozenset({psutil.Process(core), psutil.Process(compiler)})

        engine = engine_of(core, tmp_path, processes)
        looks_before = len(looks)
        held_bytes = engine.host_memory_bytes()
        assert engine.process_ids() == (core,)
        engine._death.cancel()
        return held_bytes, len(looks) - looks_before

    with holding(0) as core, holding(COMPILER_BYTES) as compiler:
        held_bytes, further_looks = run(measure(core, compiler))
    assert further_looks == 0
    assert held_bytes is not None
    assert 0 < held_bytes < COMPILER_BYTES
