"""Engines that many tests share: each start costs both cores half a minute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine_sharing import SHARED
from holdfast.demo.files import demo_directory, ensure_demo_model
from holdfast.demo.switches import DemoFault, DemoSwitches
from holdfast.worker.nan_rows import LOST_ROWS
from recorded_baselines import FLAGS, record_baseline
from servers import COMPILED, SMALL, Demo, Greedy, Server, Sight, running
from untrained import untrained_demo

LIMITS = ("--request-timeout=2.5", "--max-body-size=1MiB")
ROUTES = ("/livez", "/readyz", "/health", "/ping", "/startupz", "/statusz", "/metrics")


@pytest.fixture(scope="session")
def shared(request: pytest.FixtureRequest) -> Iterator[ExitStack]:
    """The engines that tests share now: they end when no test that shares them is to come."""
    with ExitStack() as engines:
        request.session.stash[SHARED] = engines
        yield engines


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models that the tests make are kept."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def silent_demo(models: Path) -> Path:
    """The demo model with its need undeclared."""
    return untrained_demo(models, DemoSwitches(declares_need=False))


@pytest.fixture(scope="session")
def demo_start(shared: ExitStack, tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """The demo model, READY, and what each state before that looked like."""
    flags = ("--demo", *SMALL, "--enable-auto-tool-choice", "--tool-call-parser=hermes")
    directory = tmp_path_factory.mktemp("demo")
    server = shared.enter_context(running(directory, *flags, environment=COMPILED))
    sights: dict[str, Sight] = {}
    server.until(lambda: _look(server, sights) == "READY", "READY")
    return Demo(server, sights)


@pytest.fixture(scope="session")
def demo(demo_start: Demo) -> Server:
    """The demo model, READY."""
    return demo_start.server


@pytest.fixture(scope="session")
def learned_state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """State that the two starts below share."""
    return tmp_path_factory.mktemp("learned")


@pytest.fixture(scope="session")
def first_start(shared: ExitStack, silent_demo: Path, learned_state: Path) -> Server:
    """A need that nobody declared, met for the first time; its clients have short limits."""
    flags = ("--learned-restart=always", *LIMITS)
    server = shared.enter_context(running(learned_state, str(silent_demo), *SMALL, *flags))
    server.until_ready()
    return server


@pytest.fixture(scope="session")
def second_start(
    shared: ExitStack, first_start: Server, silent_demo: Path, learned_state: Path
) -> Server:
    """The same model with what the first start learned."""
    assert first_start.process.poll() is None
    flags = (*SMALL, "--learned-restart=always")
    server = shared.enter_context(running(learned_state, str(silent_demo), *flags))
    server.until_ready()
    return server


@pytest.fixture(scope="session")
def nan_triggers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a file makes the next step of decodes of the model below fail."""
    return tmp_path_factory.mktemp("triggers")


@pytest.fixture(scope="session")
def nan_demo(models: Path, nan_triggers: Path) -> Path:
    """The demo model, sound until it is told not to be."""
    faults = (
        DemoFault("decodes", 2, "nan_row", armed_by=str(nan_triggers / "row")),
        DemoFault("decodes", LOST_ROWS, "nan", armed_by=str(nan_triggers / "step")),
    )
    return untrained_demo(models, DemoSwitches(faults=faults))


@pytest.fixture(scope="session")
def baseline(nan_demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What that model says while it is sound."""
    return record_baseline(nan_demo, tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="session")
def compared(
    shared: ExitStack, nan_demo: Path, baseline: Path, tmp_path_factory: pytest.TempPathFactory
) -> Server:
    """The same model in another process, with the baseline."""
    arguments = (str(nan_demo), *FLAGS, f"--verify-baseline={baseline}")
    server = shared.enter_context(running(tmp_path_factory.mktemp("compared"), *arguments))
    server.until_ready()
    return server


@pytest.fixture(scope="session")
def greedy_reference(silent_demo: Path) -> Greedy:
    """The weights of `silent_demo` in transformers."""
    return _greedy(silent_demo)


@pytest.fixture(scope="session")
def trained_greedy_reference() -> Greedy:
    """The weights of `demo` in transformers."""
    return _greedy(ensure_demo_model(demo_directory()))


def _greedy(model_path: Path) -> Greedy:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model_path))
    model = AutoModelForCausalLM.from_pretrained(str(model_path), dtype=torch.float32)
    model.generation_config.eos_token_id = None

    def greedy(prompt: str, count: int) -> list[int]:
        tokens = torch.tensor([tokenizer(prompt)["input_ids"]])
        output = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False
        )
        return [int(token) for token in output[0, tokens.shape[1] :]]

    return greedy


def _look(server: Server, sights: dict[str, Sight]) -> str:
    state = str(server.get("/livez").json()["state"])
    if state not in sights:
        codes = {route: server.get(route).status_code for route in ROUTES}
        metrics = server.metrics()
        refusal = server.post("/v1/completions", {"model": "holdfast-demo", "prompt": "hold"})
        metric = server.metric("state", state=state)
        if server.get("/livez").json()["state"] == state:  # else it moved while we looked
            sights[state] = Sight(codes, metrics, refusal, metric)
    return state
