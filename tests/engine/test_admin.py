"""Operators and one real engine: restart under load, probe, caches, adapters, profile, drain."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from cut_streams import carried_over
from faults import FaultyServer
from holdfast.verify.checks import oracle, self_agreement
from holdfast.verify.options import Options
from load_generator import loaded, questions, undisturbed
from lora_adapters import make_lora
from seam_streams import plain_stream, recycle
from servers import SMALL, Server, running, wait_until
from tiny_models import make_qwen
from verified import not_passed, recorded_at, results_at

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CLIENTS = 6
PATIENCE_SECONDS = 300.0
PROMPT = [50, 60, 70, 80]
ADMIN_KEY = "of-an-operator"
RECYCLE_REQUESTS = 3000
"""More than an engine is given by any test but the one that waits for this limit."""
AS_ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


@pytest.fixture(scope="module")
def adapter(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the model below."""
    directory = tmp_path_factory.mktemp("adapters") / "accent"
    return make_lora(directory, make_qwen(models / "qwen"))


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where profiles are written."""
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def server(
    models: Path, traces: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A model of another make, with LoRA and a profiler, READY."""
    flags = (
        *SMALL,
        "--dtype=float32",
        "--probe=quick",
        "--served-model-name=tiny",
        "--hold-timeout=300",
        f"--recycle-after={RECYCLE_REQUESTS}requests",
        "--recycle-within=0",
        "--enable-lora",
        "--max-loras=2",
        "--max-lora-rank=8",
        "--profiler-config.profiler=torch",
        f"--profiler-config.torch_profiler_dir={traces}",
        "--profiler-config.torch_profiler_with_stack=false",
        "--log-format=console",
        f"--admin-api-key={ADMIN_KEY}",
    )
    model = str(make_qwen(models / "qwen"))
    with running(tmp_path_factory.mktemp("admin"), model, *flags) as found:
        found.until_ready()
        yield found


def ask(server: Server, path: str, /, **body: Any) -> httpx.Response:
    """One call of an admin route."""
    return server.post(f"/admin/{path}", body, timeout=PATIENCE_SECONDS, headers=AS_ADMIN)


def unload(server: Server, name: str) -> httpx.Response:
    """Take an adapter from the list."""
    url = f"{server.url}/admin/loras/{name}"
    return server._client.delete(url, timeout=PATIENCE_SECONDS, headers=AS_ADMIN)


def text(server: Server, model: str) -> str:
    """What a model, or an adapter of it, answers greedily."""
    answer = server.completion(PROMPT, model=model, max_tokens=16, ignore_eos=True)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def restart(server: Server, reason: str) -> None:
    """Ask for the next engine, and wait until it is READY."""
    before = server.generation
    answer = ask(server, "restart", reason=reason)
    assert answer.status_code == 202, answer.text
    assert answer.json()["state"] == "RECOVERING"
    server.until(lambda: server.generation > before, "the next generation")
    server.until_ready()


def test_an_adapter_is_served_and_pinned(server: Server, adapter: Path) -> None:
    """It answers otherwise than the model, and what is not an adapter costs nothing."""
    before = text(server, "tiny")
    loaded_adapter = ask(server, "loras", name="accent", path=str(adapter))
    assert loaded_adapter.status_code == 200, loaded_adapter.text
    assert text(server, "accent") != before
    assert text(server, "tiny") == before
    assert ask(server, "loras/accent/pin").json()["is_pinned"]
    missing = ask(server, "loras", name="nobody", path=str(adapter / "nothing"))
    assert missing.status_code in {400, 404}, missing.text
    assert ask(server, "loras", name="accent", path=str(adapter)).status_code == 409
    assert server.generation == 1


def test_others_may_need_the_slot_of_a_pinned_adapter(
    server: Server, models: Path, adapter: Path
) -> None:
    """A step with as many others as there are slots ends no engine, and it answers as before."""
    accent = text(server, "accent")
    others = ("first", "second")
    for scale, name in enumerate(others, start=1):
        path = make_lora(adapter.parent / name, make_qwen(models / "qwen"), scale=scale)
        assert ask(server, "loras", name=name, path=str(path)).status_code == 200

    def answer(name: str) -> int:
        return server.completion(PROMPT, model=name, max_tokens=400, ignore_eos=True).status_code

    with ThreadPoolExecutor() as threads:
        assert list(threads.map(answer, others)) == [200, 200]
    assert text(server, "accent") == accent
    for name in others:
        unload(server, name)
    assert server.generation == 1


def test_a_replacement_that_does_not_load_changes_nothing(server: Server, adapter: Path) -> None:
    """The next request has the adapter that was there, and ends no engine."""
    accent = text(server, "accent")
    weights, whole = adapter / "adapter_model.safetensors", adapter / "whole"
    weights.rename(whole)
    weights.write_bytes(whole.read_bytes()[:-8])
    refused = ask(server, "loras", name="accent", path=str(adapter), replace=True)
    whole.replace(weights)
    assert refused.status_code == 400, refused.text
    assert text(server, "accent") == accent
    assert server.generation == 1


def test_a_restart_under_load_costs_no_answer(server: Server, adapter: Path) -> None:
    """Token for token those of an undisturbed run; a stream that has begun goes on.

    The adapters are there again, except one whose files are gone.
    """
    accent = text(server, "accent")
    copy = shutil.copytree(adapter, adapter.parent / "gone")
    assert ask(server, "loras", name="gone", path=str(copy)).status_code == 200
    shutil.rmtree(copy)
    expected = undisturbed(server, questions(7, count=10, longest_tokens=1500))
    with loaded(server, expected, clients=CLIENTS, seed=7) as load:
        wait_until(
            lambda: len(load.answers) > CLIENTS, deadline_seconds=60, what=lambda: "nobody asks"
        )
        with carried_over(server, plain_stream(300)):
            restart(server, "new weights")
    assert not load.lost, load.lost
    assert not load.wrong, load.wrong
    assert not load.broken, load.broken
    assert server.metric("engine_deaths_total", cause="requested") == 1
    known = server.get("/admin/loras", headers=AS_ADMIN).json()["loras"]
    assert known == [{"name": "accent", "path": str(adapter), "is_pinned": True}]
    assert text(server, "accent") == accent


def test_the_next_engine_meets_the_baseline(server: Server) -> None:
    """Verify asks for a restart, and finds the log-probs as they were recorded before."""
    baseline = recorded_at(server.url, ADMIN_KEY)
    restarts = [check for check in self_agreement.CHECKS if check.name == "restart"]
    made = results_at(server.url, restarts, api_key=ADMIN_KEY, admin_key=ADMIN_KEY)
    made |= results_at(server.url, oracle.comparing.CHECKS, Options(baseline), ADMIN_KEY)
    assert {name: made[name].reason for name in not_passed(made)} == {}
    assert len(made) == 5


def test_a_probe_on_request_is_passed_beside_clients(server: Server) -> None:
    """They wait, and lose nothing; the next who asks gets the same proof."""
    expected = undisturbed(server, questions(8, count=4, longest_tokens=200))
    with loaded(server, expected, clients=2, seed=8) as load:
        first = ask(server, "probe", suite="quick", max_age_seconds=0).json()
        second = ask(server, "probe", suite="quick").json()
    assert first["report"]["passed"], first
    assert second["report"] == first["report"]
    assert second["age_seconds"] > first["age_seconds"]
    assert not load.lost, load.lost
    assert not load.wrong, load.wrong
    assert server.get("/readyz").status_code == 200
    assert server.metric("engine_deaths_total", cause="unknown") == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/invocations"])
@pytest.mark.parametrize("extra", [{}, {"n": 2}])
def test_a_number_too_large_for_the_engine_is_a_bad_request(
    server: Server, path: str, extra: dict[str, Any]
) -> None:
    """And the engine has nothing left of it, which a probe would wait for."""
    message = {"role": "user", "content": "hold"}
    asks = {"messages": [message]} if "chat" in path else {"prompt": PROMPT}
    body = {"model": "tiny", "max_tokens": 1, "top_k": 10**400, **asks, **extra}
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    assert "has no encoding" in answer.json()["error"]["message"]
    server.until(lambda: server.metric("requests_in_flight") == 0, "the end of the request")
    probed = ask(server, "probe", suite="quick", max_age_seconds=0)
    assert probed.json()["report"]["passed"], probed.text


def test_a_planned_restart_under_load_costs_no_answer(server: Server) -> None:
    """An engine that was given enough requests is replaced, whatever else it does then.

    A stream that it has begun goes on in the next one.
    """
    before = server.generation
    many = [PROMPT] * (RECYCLE_REQUESTS // 6)

    def ask_many() -> None:
        answer = server.post(
            "/v1/completions",
            {"model": "tiny", "prompt": many, "max_tokens": 1},
            timeout=PATIENCE_SECONDS,
        )
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"]) == len(many)

    expected = undisturbed(server, questions(10, count=8, longest_tokens=400))
    with loaded(server, expected, clients=CLIENTS, seed=10) as load:
        recycle(server, ask_many)
    assert not load.lost, load.lost
    assert not load.wrong, load.wrong
    assert not load.broken, load.broken
    assert server.generation == before + 1
    assert server.metric("engine_recycles_total", reason="requests") == 1
    assert server.metric("engine_recycles_total") == 1
    assert server.metric("engine_host_memory_bytes") > 0
    assert "restarting, as planned: the engine was given" in server.log


def test_caches_are_emptied(server: Server) -> None:
    """All of them."""
    answer = ask(server, "cache/reset", caches=["prefix", "mm", "encoder"])
    assert answer.json() == {"caches": ["encoder", "mm", "prefix"]}


def test_a_profile_is_written(server: Server, traces: Path) -> None:
    """By the profiler of the flags; two at a time are refused."""
    assert ask(server, "profile/start", prefix="evening").status_code == 200
    assert ask(server, "profile/start").status_code == 409
    text(server, "tiny")
    stopped = ask(server, "profile/stop")
    assert stopped.status_code == 200, stopped.text
    assert any(traces.iterdir())


def test_sharded_state_is_written(server: Server, tmp_path: Path) -> None:
    """By each rank, and the server serves on."""
    target = tmp_path / "state"
    saved = ask(server, "save-sharded-state", path=str(target))
    assert saved.status_code == 200, saved.text
    assert list(target.glob("*.safetensors"))
    refused = ask(server, "save-sharded-state", path="/proc/nowhere")
    assert refused.status_code == 500
    assert "could not save its state" in refused.json()["error"]["message"]
    text(server, "tiny")


def test_the_cpu_does_not_sleep(server: Server) -> None:
    """It says so, with the flag that it would take, and serves on."""
    refused = ask(server, "sleep", level=1)
    assert refused.status_code == 409
    assert "--enable-sleep-mode" in refused.json()["error"]["message"]
    assert ask(server, "wake").status_code == 409
    assert server.get("/readyz").status_code == 200


def test_an_adapter_is_unloaded(server: Server) -> None:
    """Nobody is served by it any more, and it can be loaded again under its name."""
    assert unload(server, "accent").json() == {"loras": []}
    assert server.completion(PROMPT, model="accent").status_code == 404
    assert ask(server, "loras/accent/pin").status_code == 404


def test_calls_are_in_the_log(server: Server) -> None:
    """With who asked and what came of it."""
    name = f"key-{hashlib.sha256(ADMIN_KEY.encode()).hexdigest()[:8]}"
    assert f"admin restart by {name}: accepted" in server.log
    assert f"admin sleep by {name}: refused with 409: sleep mode is off" in server.log


def test_a_drain_ends_the_server(server: Server) -> None:
    """As SIGTERM does: what runs is answered, and the exit code is 0."""
    expected = undisturbed(server, questions(9, count=2, longest_tokens=50))
    core = FaultyServer(server, Path()).process("EngineCore")
    core.suspend()  # so that both requests are there when it begins, and run
    with loaded(server, expected, clients=2, seed=9, is_once=True) as load:
        try:
            server.until(lambda: server.metric("requests_in_flight") == 2, "both requests")
            answer = ask(server, "drain")
        finally:
            core.resume()
        assert answer.status_code == 202
        assert server.wait() == 0
    assert not load.lost, load.lost
    assert not load.wrong, load.wrong
