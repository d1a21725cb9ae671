"""How a real engine's start ends when it cannot succeed, or is not to go on."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import psutil
import pytest

from holdfast.processes import tree
from servers import Server, descendants, has_ended, running, wait_until
from untrained import untrained_demo

pytestmark = pytest.mark.engine

FLAGS = ("--enforce-eager", "--probe=quick", "--learned-dir=none")
DEADLINE_SECONDS = 60.0
TOKENS = 1500
"""Of a stream that takes the demo model seconds."""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Where the server's temporary files are; pytest's own path is too long for Unix sockets."""
    with TemporaryDirectory(prefix="held-") as directory:
        yield Path(directory)


def left_in(temporary: Path) -> list[Path]:
    """Return what outlived the process, except torch's cache."""
    return [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]


def assert_start_failed(server: Server, temporary: Path, cause: str) -> None:
    """Exit 3; the last line has vLLM's own cause and a remedy; nothing is left."""
    children = server.until(lambda: descendants(server.process.pid), "the engine's processes")
    assert server.wait() == 3, server.log[-4000:]
    line = server.last_line
    assert line.startswith("holdfast: error: the engine could not start: ")
    assert cause in line
    assert " Remedy: " in line
    assert "root cause above" not in line
    assert "Traceback" not in server.log
    assert_ended(children)
    assert left_in(temporary) == []


def assert_ended(processes: set[psutil.Process]) -> None:
    """None of them is left; the resource tracker ends just after the server."""
    wait_until(
        lambda: all(map(has_ended, processes)),
        deadline_seconds=DEADLINE_SECONDS,
        what=lambda: f"still running: {processes}",
    )


def test_a_model_that_cannot_be_loaded_is_an_engine_start_error(
    tmp_path: Path, temporary: Path
) -> None:
    """The worker raises: its error, not vLLM's "see root cause above", is the last line."""
    whole = untrained_demo(tmp_path / "models")
    broken = tmp_path / "broken"
    shutil.copytree(whole, broken)
    weights = broken / "model.safetensors"
    # Of the right size, which is looked at before an engine is started.
    weights.write_bytes(weights.read_bytes().replace(b'"dtype":"F32"', b'"dtype":"F64"'))
    flags = (str(broken), *FLAGS, "--kv-cache-memory-bytes=64M")
    with running(tmp_path, *flags, environment={"TMPDIR": str(temporary)}) as server:
        assert_start_failed(server, temporary, "SafetensorError")


def test_a_kv_cache_for_less_than_one_request_is_an_engine_start_error(
    tmp_path: Path, temporary: Path
) -> None:
    """What the reservation leaves does not hold max_model_len: vLLM's numbers are the last line."""
    flags = ("--demo", *FLAGS, "--kv-cache-memory-bytes=12M")
    with running(tmp_path, *flags, environment={"TMPDIR": str(temporary)}) as server:
        assert_start_failed(server, temporary, "max seq len")


def test_a_plugin_that_is_left_out_is_an_engine_start_error(tmp_path: Path) -> None:
    """VLLM_PLUGINS without ours: what cannot be proven does not start."""
    environment = {"VLLM_PLUGINS": "something_else"}
    with running(tmp_path, "--demo", *FLAGS, environment=environment) as server:
        assert server.wait() == 3
        assert "VLLM_PLUGINS=something_else leaves out holdfast" in server.last_line
        assert "Remedy: add holdfast" in server.last_line


def test_a_second_signal_ends_a_real_engine_at_once(tmp_path: Path, temporary: Path) -> None:
    """While its processes start: neither they nor their sockets stay, whichever signal was in time.

    The first may end all before the second is there, since nothing runs that could be drained.
    """
    flags = ("--demo", *FLAGS, "--kv-cache-memory-bytes=64M")
    with running(tmp_path, *flags, environment={"TMPDIR": str(temporary)}) as server:
        children = server.until(lambda: _engine_of(server), "an engine")
        server.process.send_signal(signal.SIGTERM)
        wait_until(
            lambda: "state: DRAINING" in server.log or server.process.poll() is not None,
            deadline_seconds=DEADLINE_SECONDS,
            what=lambda: server.log[-4000:],
        )
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() in {0, 128 + signal.SIGTERM}
        assert_ended(children)
        assert left_in(temporary) == []


def test_ctrl_c_lets_a_real_engine_finish_its_streams(tmp_path: Path, temporary: Path) -> None:
    """A terminal sends SIGINT to the whole process group; the engine's processes are not in it."""
    flags = ("--demo", *FLAGS, "--kv-cache-memory-bytes=64M")
    with running(
        tmp_path,
        *flags,
        environment={"TMPDIR": str(temporary)},
        command=("setsid", sys.executable, "-m", "holdfast", "serve"),
    ) as server:
        server.until_ready()
        body = {"model": server.model, "prompt": "Count.", "stream": True, "ignore_eos": True}
        body["max_tokens"] = TOKENS
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            os.killpg(server.process.pid, signal.SIGINT)
            assert "data: [DONE]" in list(lines)
        assert server.wait() == 0
        assert "the engine died" not in server.log


@pytest.mark.parametrize("stage", ["fork server", "EngineCore", "Worker"])
def test_a_killed_front_end_takes_its_engine_along(
    tmp_path: Path, temporary: Path, stage: str
) -> None:
    """Whatever its processes are doing: nobody is there to end them but the kernel."""
    flags = ("--demo", *FLAGS, "--kv-cache-memory-bytes=64M")
    # A worker that vLLM binds is spawned at the first start.
    environment = {"TMPDIR": str(temporary), "VLLM_CPU_OMP_THREADS_BIND": "auto"}
    with running(tmp_path, *flags, environment=environment) as server:
        reached = {"fork server": _any_child, "EngineCore": _grandchild, "Worker": _spawned}[stage]
        server.until(lambda: reached(server), stage)
        children = engine_processes(server)
        server.process.kill()
        server.wait()
        assert_ended(children)


def engine_processes(server: Server) -> set[psutil.Process]:
    """Its descendants but the resource tracker, which ends when it has cleaned up."""
    found = descendants(server.process.pid)
    return {child for child in found if not tree._is_resource_tracker(child)}


def _any_child(server: Server) -> bool:
    return bool(engine_processes(server))


def _grandchild(server: Server) -> bool:
    with suppress(psutil.NoSuchProcess):
        return any(p.ppid() != server.process.pid for p in engine_processes(server))
    return False


def _spawned(server: Server) -> bool:
    """Whether a worker imports: spawned by the core, and not named yet."""
    with suppress(psutil.Error):
        return any("spawn_main" in " ".join(p.cmdline()) for p in engine_processes(server))
    return False


def _engine_of(server: Server) -> set[psutil.Process]:
    return {p for p in descendants(server.process.pid) if "EngineCore" in _name(p)}


def _name(process: psutil.Process) -> str:
    """Empty for a process that has ended."""
    try:
        return process.name()
    except psutil.Error:
        return ""
