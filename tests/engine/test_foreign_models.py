"""Models that our code does not know pass the same suite."""

from __future__ import annotations

import asyncio
import os
import socket
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from PIL import Image

import tiny_models
from holdfast.verify.checks.self_agreement import adapters
from holdfast.verify.command import EXIT_CODES
from holdfast.verify.options import Options
from holdfast.verify.records import CheckStatus
from lora_adapters import make_lora
from servers import SMALL, Server, descendants, running, title_of
from verified import (
    BEYOND_RANDOM_WEIGHTS,
    not_passed,
    of_standard,
    require_report,
    results_at,
    verified_at,
)

pytestmark = [pytest.mark.engine, pytest.mark.own_engines, pytest.mark.timeout(900)]


ADMIN = "the-key-of-an-operator"
QUICK_SECONDS = 600
MAY_BE_SKIPPED = dict.fromkeys(("wire.stop", "self.beside_adapter"), CheckStatus.SKIPPED)
"""If the model says nothing that could stop it; without an adapter."""
GENERATED = {
    "first_token",
    "context_sweep",
    "full_context",
    "prefix_continuation",
    "batch_sweep",
    "full_batch",
    "widest_decode",
    "mixed",
    "first_sampling",
}


def _assert_proven(server: Server, steps: set[str]) -> None:
    """These steps have passed, and the whole context is proven."""
    probe = server.status["probe"]
    assert {s["name"] for s in probe["steps"] if s["outcome"] == "passed"} == steps
    assert probe["passed"]
    assert not probe["limited"]
    assert probe["proven_tokens"] == tiny_models.MAX_MODEL_TOKENS - 1


def _assert_right(server: Server, directory: Path) -> None:
    """Every check of two profiles that random weights can pass does, over a death too.

    `quick` runs as its users run it. It has another size of a full batch than `standard`, and other
    noise behind long contexts.
    """
    quick = asyncio.run(verified_at(server.url, directory, deadline_seconds=QUICK_SECONDS))
    require_report(quick.report)
    assert quick.code in set(EXIT_CODES.values())
    assert sound(not_passed(quick.results)).items() <= MAY_BE_SKIPPED.items(), quick.output
    kill = ("kill", "-KILL", str(_core_of(server).pid))
    made = results_at(server.url, of_standard(), Options(kill_command=kill))
    reasons = {name: made[name].reason for name in not_passed(made)}
    assert not_passed(made).items() <= MAY_BE_SKIPPED.items(), reasons
    assert server.generation == 2


def sound(results: Mapping[str, CheckStatus]) -> dict[str, CheckStatus]:
    """Those of the checks that a model with random weights can pass."""
    return {
        name: one for name, one in results.items() if not name.startswith(BEYOND_RANDOM_WEIGHTS)
    }


def test_generating_model_passes_every_step(models: Path, tmp_path: Path) -> None:
    """Every step that applies passes, with a mixture of experts and a tokenizer of Mistral's."""
    model = tiny_models.make_mixtral(models / "mixtral")
    with running(tmp_path, str(model), *SMALL, "--tokenizer-mode=mistral") as server:
        server.until_ready()
        _assert_proven(server, GENERATED)
        _assert_right(server, tmp_path)


def test_dense_model_answers_right(models: Path, tmp_path: Path) -> None:
    """Verify finds nothing wrong with a second model, which has a tokenizer of Hugging Face's."""
    model = tiny_models.make_qwen(models / "qwen")
    with running(tmp_path, str(model), *SMALL) as server:
        server.until_ready()
        _assert_right(server, tmp_path)


def test_stream_does_not_go_on_with_other_weights(tmp_path: Path) -> None:
    """Its rest would be the answer of another model; the next request gets that model.

    Weights that were changed in the memory of an engine are lost with it.
    """
    model = tiny_models.make_qwen(tmp_path / "qwen")
    environment = {"VLLM_SERVER_DEV_MODE": "1", "HOLDFAST_ADMIN_API_KEY": ADMIN}
    with running(tmp_path, str(model), *SMALL, environment=environment) as server:
        server.until_ready()
        last = _end_of_stream(server, lambda: os.utime(model / "model.safetensors", ns=(0, 0)))
        assert "The model has changed since this answer began." in last
        assert server.metric("requests_lost_total", reason="stream_broken") == 1
        server.until_ready()
        named = {"headers": {"authorization": f"Bearer {ADMIN}"}}
        path, body = "/update_weight_version", {"new_version": "2"}
        assert server.post(path, body, **named).status_code == 200
        assert "error" in _end_of_stream(server)
        assert server.metric("requests_lost_total", reason="stream_broken") == 2
        server.until(lambda: server.generation == 3, "the third engine")
        server.until_ready()
        assert _end_of_stream(server) == "data: [DONE]"
        assert server.metric("requests_continued_total") == 1


def _end_of_stream(server: Server, change: Callable[[], None] = lambda: None) -> str:
    """The last line of a stream whose engine is killed after its first token."""
    core = _core_of(server)
    asked = {"model": server.model, "prompt": "a", "max_tokens": 400, "ignore_eos": True}
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={**asked, "stream": True}, timeout=180
    ) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        core.suspend()
        change()
        core.kill()
        return [line for line in lines if line][-1]


def test_embedding_model_passes_the_steps_that_apply(models: Path, tmp_path: Path) -> None:
    """A pooling model proves its contexts and batches; what cannot apply says why."""
    model = tiny_models.make_embedding(models / "embedding")
    # vLLM prefills the prompts of a pooling model whole.
    whole = f"--max-num-batched-tokens={tiny_models.MAX_MODEL_TOKENS}"
    with running(tmp_path, str(model), *SMALL, whole) as server:
        server.until_ready()
        steps = {step["name"]: step for step in server.status["probe"]["steps"]}
        passed = {name for name, step in steps.items() if step["outcome"] == "passed"}
        assert passed == {
            "first_token",
            "context_sweep",
            "full_context",
            "batch_sweep",
            "full_batch",
        }
        skipped = [step for step in steps.values() if step["outcome"] == "skipped"]
        assert len(skipped) == 7
        assert all(step["reason"] for step in skipped)
        asked = {"model": server.model, "input": ["hold fast", "and again"]}
        answer = server.post("/v1/embeddings", asked)
        assert answer.status_code == 200
        assert _over_a_death(server, asked) == answer.json()["data"]


def _core_of(server: Server) -> psutil.Process:
    found = descendants(server.process.pid)
    return next(process for process in found if "EngineCore" in title_of(process))


def _over_a_death(server: Server, asked: dict[str, Any]) -> object:
    """The data of an answer whose engine is killed while it works on it."""
    core = _core_of(server)
    core.suspend()  # so that it has the request, and no answer, when it is killed
    with ThreadPoolExecutor(1) as client:
        answering = client.submit(server.post, "/v1/embeddings", asked, timeout=180)
        server.until(lambda: server.sent == len(asked["input"]), "all of the request")
        core.kill()
        answer = answering.result()
    assert server.metric("requests_replayed_total") == len(asked["input"])
    return answer.json()["data"]


@pytest.fixture(scope="module")
def seeing(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a model that takes images, which is READY."""
    model = tiny_models.make_blip(models / "blip")
    with running(tmp_path_factory.mktemp("seeing"), str(model), *SMALL) as server:
        server.until_ready()
        yield server


def about(server: Server, address: str) -> httpx.Response:
    """What the model says about an image."""
    picture = {"type": "image_url", "image_url": {"url": address}}
    content = [picture, {"type": "text", "text": "What is this?"}]
    messages = [{"role": "user", "content": content}]
    body = {"model": server.model, "messages": messages, "max_tokens": 8, "temperature": 0}
    return server.post("/v1/chat/completions", body, timeout=180)


def a_picture() -> str:
    """An image as a chat has it."""
    file = BytesIO()
    Image.new("RGB", (tiny_models.IMAGE_PIXELS, tiny_models.IMAGE_PIXELS), "red").save(file, "PNG")
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"


def test_model_that_takes_images_is_shown_the_largest(seeing: Server) -> None:
    """It goes through vLLM's processor and the encoder before a client's does."""
    steps = {step["name"]: step for step in seeing.status["probe"]["steps"]}
    pixels = tiny_models.IMAGE_PIXELS
    assert steps["first_image"]["outcome"] == "passed", steps
    assert f"{pixels} x {pixels}" in steps["first_image"]["reason"]
    assert steps["first_image"]["tokens"] > tiny_models.QUERY_TOKENS


def test_no_image_is_fetched_from_this_machine(seeing: Server) -> None:
    """Unless the operator allows it, a client gets nothing from the server's own network."""
    with socket.create_server(("127.0.0.1", 0)) as inside:
        host, port = inside.getsockname()
        answer = about(seeing, f"http://{host}:{port}/picture.png")
        inside.setblocking(False)
        with pytest.raises(BlockingIOError):
            inside.accept()
    assert answer.status_code == 422, answer.text


def test_an_image_that_was_sent_before_outlives_the_engine(seeing: Server) -> None:
    """As with each turn of a chat: the next engine gets it as the last one did."""
    first = about(seeing, a_picture())
    core = _core_of(seeing)
    core.suspend()  # so that it has the request, and no answer, when it is killed
    sent = seeing.sent
    with ThreadPoolExecutor(1) as client:
        answering = client.submit(about, seeing, a_picture())
        seeing.until(lambda: seeing.sent > sent, "the request")
        core.kill()
        again = answering.result()
    assert (first.status_code, again.status_code) == (200, 200), again.text
    assert again.json()["choices"] == first.json()["choices"]


def test_first_adapter_that_is_listed_is_proven(models: Path, tmp_path: Path) -> None:
    """LoRA's kernels meet a decode and a full step before READY, beside every other step."""
    model = tiny_models.make_qwen(models / "qwen")
    adapter = make_lora(tmp_path / "adapter", model)
    flags = ("--enable-lora", "--max-lora-rank=8", f"--lora-modules=tiny={adapter}")
    with running(tmp_path, str(model), *SMALL, *flags) as server:
        server.until_ready()
        _assert_proven(server, GENERATED | {"first_adapter"})
        steps = {step["name"]: step for step in server.status["probe"]["steps"]}
        assert "tiny" in steps["first_adapter"]["reason"]
        # On a CPU, vLLM gives the base model's rows of a step the weights of the last adapter:
        # https://github.com/vllm-project/vllm/pull/48421
        made = results_at(server.url, adapters.CHECKS)
        assert not_passed(made) == {"self.beside_adapter": CheckStatus.FAILED}


def test_whisper_hears_silence_before_and_after_a_death(models: Path, tmp_path: Path) -> None:
    """A model that takes no tokens is proven by a transcription, and replaced as any other."""
    pytest.importorskip("soundfile", reason="vLLM reads audio with it")
    model = tiny_models.make_whisper(models / "whisper")
    with running(tmp_path, str(model), *SMALL, "--max-num-batched-tokens=4096") as server:
        server.until_ready()
        steps = {step["name"]: step for step in server.status["probe"]["steps"]}
        passed = {name for name, step in steps.items() if step["outcome"] == "passed"}
        assert passed == {"first_token"}
        _core_of(server).kill()
        server.until(lambda: server.generation == 2, "the next engine")
        server.until_ready()
