"""A start with a mistake names the flag, variable or file, and says what to do."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from holdfast.cli import parse_serve
from holdfast.demo.files import ensure_demo_model
from holdfast.errors import EngineStartError, HoldfastError, UsageError
from holdfast.lifecycle.states import State
from holdfast.processes.environment import NativeVariables

TINY = ("--enforce-eager", "--kv-cache-memory-bytes=67108864", "--max-model-len=512")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which nothing is wrong."""
    return ensure_demo_model(tmp_path_factory.mktemp("models"))


@pytest.fixture
def model(sound: Path, tmp_path: Path) -> Path:
    """A copy of it, to break."""
    return Path(shutil.copytree(sound, tmp_path / "model"))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's parser sets a variable, and its loggers get filters, which end with the test."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD")  # else forks are ruled out, for good
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    handlers = [(handler, list(handler.filters)) for handler in logging.getLogger("vllm").handlers]
    yield
    for handler, filters in handlers:
        handler.filters = filters


def told(tmp_path: Path, model: Path, *arguments: str) -> str:
    """Return the last line of a start that ends with 2 before there is an engine."""
    from holdfast.engine.launch.configure import configure

    settings = parse_serve([str(model), *TINY, *arguments], {})
    with pytest.raises(UsageError) as caught:
        configure(settings, tmp_path, lambda: State.STARTING, NativeVariables(None, ()))
    assert caught.value.remedy
    assert caught.value.exit_code == 2
    return caught.value.line


def test_nothing_is_wrong_with_the_sound_model(tmp_path: Path, model: Path) -> None:
    """What the others break is what they are refused for."""
    from holdfast.engine.launch.configure import configure

    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    given = (str(model), *TINY, f"--lora-modules=x={adapter}", "--chat-template={{ messages }}")
    settings = parse_serve(given, {})
    configure(settings, tmp_path, lambda: State.STARTING, NativeVariables(None, ()))


def test_vllm_commands_no_terminal_in_the_front_end(tmp_path: Path, sound: Path) -> None:
    """Whichever of its loggers quotes a client."""
    from vllm.logging_utils import NewLineFormatter

    from holdfast.engine.launch.configure import configure
    from holdfast.patches.patch import is_replaced, original

    NewLineFormatter.format = original(NewLineFormatter, "format")
    settings = parse_serve([str(sound), *TINY], {})
    configure(settings, tmp_path, lambda: State.STARTING, NativeVariables(None, ()))
    assert is_replaced(NewLineFormatter, "format")


@pytest.mark.parametrize(("given", "is_on"), [((), True), (("--continue-streams=off",), False)])
def test_continue_streams_reaches_the_proxy(
    tmp_path: Path, sound: Path, given: tuple[str, ...], *, is_on: bool
) -> None:
    """Which hands a stream to the next engine; on by default."""
    from holdfast.engine.launch.configure import configure

    settings = parse_serve([str(sound), *TINY, *given], {})
    found = configure(settings, tmp_path, lambda: State.STARTING, NativeVariables(None, ()))
    assert found.launcher.proxy.continues_streams() is is_on


@pytest.mark.parametrize(
    ("given", "flag", "most"), [(None, 8, 128), (None, 200, 200), ("500", 200, 500)]
)
def test_a_request_may_ask_for_128_answers_or_for_as_many_as_run_at_once(
    tmp_path: Path,
    sound: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: str | None,
    flag: int,
    most: int,
) -> None:
    """If that is more, or for what the operator says; vLLM's own default is 16,384."""
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    from holdfast.engine.launch.configure import configure

    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", given or "")  # put back later
    if given is None:
        monkeypatch.delenv("VLLM_MAX_N_SEQUENCES")
    settings = parse_serve([str(sound), *TINY, f"--max-num-seqs={flag}"], {})
    configure(settings, tmp_path, lambda: State.STARTING, NativeVariables(None, ()))
    assert SamplingParams(n=most).n == most
    with pytest.raises(VLLMValidationError, match=f"at most {most}"):
        SamplingParams(n=most + 1)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--chat-template=/nope.jinja", ("--chat-template", "/nope.jinja")),
        ("--chat-template={% for %}", ("--chat-template", "line 1", "Expected an expression")),
        ("--lora-modules=x=/nope", ("--lora-modules", "x: /nope is not an adapter")),
        ("--hf-overrides={not json", ("--hf-overrides", "'{not json' is not a JSON object")),
    ],
)
def test_a_wrong_flag_is_named(
    tmp_path: Path, model: Path, argument: str, words: tuple[str, ...]
) -> None:
    """Before an engine is started."""
    line = told(tmp_path, model, argument)
    assert all(word in line for word in words), line
    assert "callable" not in line


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _point(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 17\n")


def _garble(path: Path) -> None:
    path.write_bytes(b"<!doctype html>" * 10)


@pytest.mark.parametrize(
    ("name", "harm", "words"),
    [
        ("model.safetensors", _cut, ("bytes", "download it again")),
        ("model.safetensors", _point, ("git-lfs", "git lfs pull")),
        ("model.safetensors", _garble, ("not a safetensors file",)),
        ("tokenizer.json", lambda path: path.write_text("{}"), ("no `model`", "--tokenizer")),
        ("tokenizer.json", lambda path: path.write_text("{"), ("not JSON",)),
        ("tokenizer.json", _point, ("git-lfs",)),
    ],
)
def test_a_broken_file_is_named(
    tmp_path: Path, model: Path, name: str, harm: Callable[[Path], object], words: tuple[str, ...]
) -> None:
    """Of forty shards the one that is cut off, and what stands in the place of a file."""
    harm(model / name)
    line = told(tmp_path, model)
    assert str(model / name) in line
    assert all(word in line for word in words), line


def test_a_directory_without_a_model_is_told(tmp_path: Path) -> None:
    """vLLM's own text is about repositories, of three formats."""
    (tmp_path / "noconf").mkdir()
    line = told(tmp_path, tmp_path / "noconf")
    assert line.endswith("noconf has no config.json. Remedy: name the model's directory.")


def test_too_long_a_context_is_told_without_bad_advice(tmp_path: Path, sound: Path) -> None:
    """vLLM's own text urges a variable with which the answers would be wrong."""
    line = told(tmp_path, sound, "--max-model-len=9999999")
    assert "--max-model-len 9999999 is longer than the model's context of" in line
    assert "VLLM_ALLOW" not in line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (KeyError("invalid parser: x (chose from y)"), "invalid parser: x (chose from y)"),
        (KeyError("rope"), "'rope' is missing"),
        (TypeError("Error: x requires y"), "x requires y"),
    ],
)
def test_no_exception_is_named(error: Exception, line: str) -> None:
    """Its name says nothing to an operator."""
    from holdfast.engine.vllm_errors import usage_errors

    with pytest.raises(UsageError) as caught, usage_errors():
        raise error
    assert caught.value.cause == line


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path, model: Path) -> None:
    """It would fail at every start in the same way."""
    (model / "tokenizer.json").unlink()
    line = told(tmp_path, model)
    assert f"there is no tokenizer in {model}" in line
    assert "tokenizer.json" in line


def test_the_reason_that_vllm_only_logs_is_told(tmp_path: Path, model: Path) -> None:
    """A model with code that cannot be imported: vLLM points to a log, which we quote."""
    config = json.loads((model / "config.json").read_text())
    config["architectures"] = ["BrokenForCausalLM"]
    (model / "config.json").write_text(json.dumps(config))
    from vllm import ModelRegistry

    ModelRegistry.register_model("BrokenForCausalLM", "no_such_module_at_all:Broken")
    line = told(tmp_path, model)
    assert "No module named 'no_such_module_at_all'" in line


def test_a_variable_that_vllm_cannot_read_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path
) -> None:
    """Its own error says only what the text was."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "lots")
    assert "VLLM_CPU_KVCACHE_SPACE has an invalid value: " in told(tmp_path, model)


@pytest.mark.filterwarnings("ignore:--log-config-file is deprecated")
@pytest.mark.parametrize(
    ("variables", "arguments", "words"),
    [
        ({"VLLM_LOGGING_LEVEL": "loud"}, "", "VLLM_LOGGING_LEVEL: | 'LOUD'"),
        # With a level of its own, since vLLM's logging has been configured without.
        ({"VLLM_LOGGING_STREAM": "ext://sys.no"}, "--log-level=error", "VLLM_LOGGING_STREAM: |.no"),
        ({"VLLM_LOGGING_CONFIG_PATH": "/no"}, "", "VLLM_LOGGING_CONFIG_PATH /no: |exist: /no."),
        ({"VLLM_LOGGING_CONFIG_PATH": "/a"}, "--log-config-file=/no", "--log-config-file /no: "),
        ({}, "--logging-config.pylogging_config_file=/no", "--logging-config /no: |exist: /no."),
    ],
)
def test_what_vllm_cannot_log_by_is_named(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    sound: Path,
    variables: dict[str, str],
    arguments: str,
    words: str,
) -> None:
    """Its own errors name neither the flag nor the variable."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    line = told(tmp_path, sound, *arguments.split())
    assert all(word in line for word in words.split("|")), line


@pytest.mark.parametrize("content", ["{", "[]", '{"formatters": []}', '{"version": 7}', "\xff"])
def test_a_file_that_vllm_cannot_log_by_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sound: Path, content: str
) -> None:
    """Whichever error it leads to."""
    file = tmp_path / "logging.json"
    file.write_text(content, encoding="latin-1")
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", str(file))
    assert f"VLLM_LOGGING_CONFIG_PATH {file}: " in told(tmp_path, sound)


def test_a_variable_that_vllm_reads_while_it_is_imported_is_named(tmp_path: Path) -> None:
    """The import ends with an error that names no variable."""
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "serve", "--demo", "--port=0", "--host=127.0.0.1"],
        env={**os.environ, "VLLM_CONFIGURE_LOGGING": "lots", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    assert "VLLM_CONFIGURE_LOGGING has an invalid value: " in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("mistyped", ["--max-modellen", "--max-model-length", "--enforce-eagr"])
def test_a_flag_that_may_be_meant_is_named(mistyped: str) -> None:
    """One of vLLM's several hundred."""
    from holdfast.engine.launch.arguments import parse

    with pytest.raises(UsageError, match=mistyped) as caught:
        parse(parse_serve(["model", mistyped], {}))
    assert re.match(r"did you mean --(max-model-len|enforce-eager)\?", caught.value.remedy)


def test_no_flag_of_vllm_is_taken_for_one_of_ours() -> None:
    """What is almost one of ours is refused before vLLM's parser sees it."""
    from holdfast import settings
    from holdfast.engine import unsupported
    from holdfast.engine.launch.arguments import _parser

    theirs = [flag for flag in _parser()._option_string_actions if flag.startswith("--")]
    assert len(theirs) > 200
    ours = {flag.name for flag in settings.flags()}
    unsupported.refuse_mistyped(flag for flag in theirs if flag not in ours)


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden_size": "wide"},
        {"num_attention_heads": 0},
        {"rope_parameters": "default"},
        {"max_position_embeddings": "long"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_wrong_value_in_the_configuration_of_a_model_is_told(
    tmp_path: Path, model: Path, wrong: dict[str, object]
) -> None:
    """Whichever error it leads to."""
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **wrong}))
    assert told(tmp_path, model)


@pytest.mark.parametrize("error", [ZeroDivisionError("modulo"), AttributeError("no items")])
def test_an_error_of_a_configuration_names_its_file(error: Exception) -> None:
    """Its message alone would say nothing."""
    from holdfast.engine.vllm_errors import model_errors

    said = f"/m cannot be used: {type(error).__name__}: {error}"
    with pytest.raises(UsageError, match=said) as caught, model_errors("/m"):
        raise error
    assert "config.json" in caught.value.remedy


class _Refusing(BaseHTTPRequestHandler):
    """A Hub that answers each request with the status that its path begins with."""

    def do_HEAD(self) -> None:
        self.send_response(int(self.path.split("/")[1]))
        self.end_headers()

    do_GET = do_HEAD  # noqa: N815 - as above

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    """The address of such a Hub."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Refusing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _looked_up(endpoint: str) -> HoldfastError:
    """The error of a start that looks a model up there."""
    from huggingface_hub import HfApi

    from holdfast.engine.vllm_errors import usage_errors

    def look_up() -> None:
        try:
            HfApi(endpoint).model_info("org/model")
        except Exception as error:
            raise ValueError("Invalid repository ID") from error

    with pytest.raises(HoldfastError) as caught, usage_errors():
        look_up()
    return caught.value


@pytest.fixture
def closed() -> str:
    """The address of a Hub that cannot be reached."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize(("path", "code"), [("/503", 3), ("/404", 2), (None, 3)])
def test_a_hub_that_lacks_only_an_adapter_is_told_alike(
    tmp_path: Path,
    sound: Path,
    monkeypatch: pytest.MonkeyPatch,
    hub: str,
    closed: str,
    path: str | None,
    code: int,
) -> None:
    """Before an engine is started; vLLM would say that there is no such adapter."""
    from huggingface_hub import constants

    from holdfast.engine.launch.configure import configure

    monkeypatch.setattr(constants, "ENDPOINT", closed if path is None else hub + path)
    settings = parse_serve([str(sound), *TINY, "--lora-modules=x=org/adapter"], {})
    with pytest.raises(HoldfastError, match="--lora-modules: x: ") as caught:
        configure(settings, tmp_path, lambda: State.STARTING, NativeVariables(None, ()))
    assert caught.value.exit_code == code


def test_a_hub_that_cannot_be_reached_ends_a_start_that_may_be_tried_again(closed: str) -> None:
    """With 3, which services restart; the model and the flags may be right."""
    error = _looked_up(closed)
    assert error.exit_code == 3
    assert "the Hugging Face Hub cannot be reached: " in error.cause
    assert "HF_HUB_OFFLINE=1" in error.remedy


@pytest.mark.parametrize(("status", "code"), [(429, 3), (503, 3), (401, 2), (404, 2)])
def test_a_hub_that_has_no_time_is_told_from_one_that_has_no_such_model(
    hub: str, status: int, code: int
) -> None:
    """A start that is tried again finds the model in the one case only."""
    assert _looked_up(f"{hub}/{status}").exit_code == code


def test_a_machine_without_a_device_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may not be loaded yet; vLLM's message names a variable for its log."""
    from vllm import platforms
    from vllm.config import DeviceConfig
    from vllm.platforms.interface import UnspecifiedPlatform

    from holdfast.engine.vllm_errors import usage_errors

    monkeypatch.setattr(platforms, "_current_platform", UnspecifiedPlatform())
    with pytest.raises(EngineStartError, match="no device") as caught, usage_errors():
        DeviceConfig()
    assert "--gpus all" in caught.value.remedy


def test_an_engine_that_is_killed_while_it_starts_is_told_so() -> None:
    """The exit code stands in a dictionary at the end of vLLM's message."""
    from holdfast.engine.vllm_errors import start_errors

    said = (
        "Engine core initialization failed. See root cause above. "
        "Failed core proc(s): {'EngineCore': -9}"
    )
    with pytest.raises(EngineStartError) as caught, start_errors(str):
        raise RuntimeError(said)
    assert "EngineCore was killed by SIGKILL (probably for lack of memory)." in caught.value.line
    assert "more memory" in caught.value.remedy
