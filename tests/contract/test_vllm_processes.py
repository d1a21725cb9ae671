"""How vLLM starts its EngineCores: what Holdfast replaces is where it looks for it."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import signal
import subprocess
import tempfile
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.utils.file_baton import FileBaton
from vllm import envs
from vllm.distributed.device_communicators import pynccl_allocator
from vllm.model_executor.model_loader.weight_cache import protocol
from vllm.v1 import utils as v1_utils
from vllm.v1.engine import utils as engine_utils
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor.multiproc_executor import WorkerProc
from vllm.v1.outputs import ModelRunnerOutput

from holdfast.engine.launch import startup
from holdfast.patches import front_end
from holdfast.patches.engine import (
    BUILD_LOCK,
    find_weight_cache,
    keep_builds,
    prepare_builds,
)
from holdfast.processes import cleanup, forkserver, tree
from holdfast.worker import lifetime
from holdfast.workspace.plan import WorkspaceSpec


class Configuration:
    """What `forked_cores` reads of a VllmConfig."""

    class parallel_config:  # noqa: N801 - vLLM's name
        numa_bind = False


def test_the_manager_of_cores_asks_for_its_context_by_this_name() -> None:
    """`CoreEngineProcManager` looks `get_mp_context` up in its module when it starts a core."""
    source = inspect.getsource(engine_utils.CoreEngineProcManager.__init__)
    assert "context = get_mp_context()" in source
    assert "context.Process(" in source
    with front_end.forked_cores(Configuration, forkserver.Context()):
        assert isinstance(engine_utils.get_mp_context(), forkserver.Context)
    assert not isinstance(engine_utils.get_mp_context(), forkserver.Context)


def test_numa_binding_needs_a_spawned_core() -> None:
    """It puts a wrapper before the executable, which a fork has none of."""
    bound = type("Bound", (), {"parallel_config": type("P", (), {"numa_bind": True})})
    with front_end.forked_cores(bound, forkserver.Context()):
        assert not isinstance(engine_utils.get_mp_context(), forkserver.Context)


def test_a_core_handles_sigterm_before_it_loads_plugins() -> None:
    """Our note of it calls the handler that is there."""
    source = inspect.getsource(EngineCoreProc.run_engine_core)
    assert source.index("signal.signal(signal.SIGTERM") < source.index("EngineCoreProc(*args")


def test_a_core_is_named_as_the_plugin_expects() -> None:
    """By the name of its process the plugin knows where a request to end is noted."""
    source = inspect.getsource(engine_utils.CoreEngineProcManager.__init__)
    assert 'else "EngineCore"' in source
    assert 'f"EngineCore_DP{global_index}"' in source


def test_workers_are_started_by_multiprocessing() -> None:
    """So that they are tied to their core by `lifetime.make_spawned_die_with_parent`."""
    assert "context.Process(" in inspect.getsource(WorkerProc.make_worker_process)
    lifetime.make_spawned_die_with_parent()
    command = multiprocessing.spawn.get_command_line(pipe_handle=1)
    assert f"os.getppid() == {os.getpid()}" in " ".join(map(os.fsdecode, command))


def test_torch_finds_its_caches_in_the_private_temporary_directory(tmp_path: Path) -> None:
    """They outlive the generation, which removes the way to them and not what is there."""
    directory = tmp_path / "1"
    startup.prepare(directory, WorkspaceSpec(str(directory), 1, 0, 0.1, "deny", None))
    shared = Path(default_cache_dir())
    assert (directory / shared.name).resolve() == shared.resolve()
    cleanup.remove(directory)
    assert not directory.exists()
    assert shared.is_dir()


def test_what_a_rank_builds_is_there_for_the_next_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM builds its NCCL allocator in the temporary directory, which ends with the engine."""
    asked: list[str] = []

    def load_inline(**named: Any) -> None:
        asked.append(named["build_directory"])
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(pynccl_allocator, "load_inline", load_inline)
    monkeypatch.setattr(pynccl_allocator, "tempfile", pynccl_allocator.tempfile)
    monkeypatch.setattr(pynccl_allocator, "_nccl_allocator_failed_to_compile", False)
    monkeypatch.setattr(pynccl_allocator, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    for generation in (tmp_path / "1", tmp_path / "2"):
        startup.prepare(generation, WorkspaceSpec(str(generation), 1, 0, 0.1, "deny", None))
        keep_builds(generation)
        pynccl_allocator.compile_nccl_allocator()
        cleanup.remove(generation)
    assert asked == [str(tmp_path / "builds")] * 2
    assert Path(asked[0]).is_dir()


def test_an_engine_finds_the_weight_cache_of_its_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon's socket is in a temporary directory, and an engine has one of its own."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    daemon = protocol.get_socket_path("GPU-0")
    variables = startup.variables(Path("/run/1"))
    monkeypatch.setattr(os, "environ", os.environ | variables)
    monkeypatch.setattr("tempfile.tempdir", variables["TMPDIR"])
    monkeypatch.setattr(protocol, "tempfile", tempfile)
    assert protocol.get_socket_path("GPU-0") != daemon
    find_weight_cache()
    assert protocol.get_socket_path("GPU-0") == daemon


def test_a_build_that_was_killed_does_not_hold_up_the_next(tmp_path: Path) -> None:
    """torch waits without end for its lock, even if the process that made it is gone."""
    prepare_builds(tmp_path / "1")
    baton = FileBaton(str(tmp_path / "builds" / BUILD_LOCK))
    assert baton.try_acquire()
    prepare_builds(tmp_path / "2")
    assert FileBaton(baton.lock_file_path).try_acquire()


def test_compiled_attention_outlives_a_generation() -> None:
    """FlashAttention 4 keeps it in the temporary directory, unless this variable says otherwise."""
    directory = Path("/run/holdfast")
    first, second = (startup.variables(directory / name) for name in "12")
    name = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
    assert first["TMPDIR"] != second["TMPDIR"]
    assert first[name] == second[name]
    assert not first[name].startswith(str(directory))


def test_the_engine_counts_nans_unless_its_operator_forbids_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM reads this variable, and reports by request."""
    name = startup.NAN_VARIABLE
    monkeypatch.delenv(name, raising=False)
    assert startup.variables(Path("/run"))[name] == "1"
    monkeypatch.setenv(name, "0")
    assert startup.variables(Path("/run"))[name] == "0"
    assert name in envs.environment_variables
    assert "num_nans_in_logits" in {field.name for field in fields(ModelRunnerOutput)}


@pytest.mark.parametrize("name", ["_forkserver_pid", "_forkserver_alive_fd"])
def test_the_fork_server_of_this_python_has_the_state_we_read(name: str) -> None:
    """None of it is public."""
    server: Any = multiprocessing.forkserver._forkserver
    assert hasattr(server, name)


def test_a_shutdown_passes_over_what_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own raises where a process ends between two of its looks, and leaves the rest."""
    monkeypatch.setattr(v1_utils, "kill_process_tree", v1_utils.kill_process_tree)  # put it back
    front_end.kill_trees_by(tree.kill_tree)
    for _ in range(20):
        busy = subprocess.Popen(["sh", "-c", "while :; do /bin/true; done"])
        v1_utils.shutdown([_Unaware(busy.pid)], 0)
        assert busy.wait(10) == -signal.SIGKILL


class _Unaware:
    """What vLLM knows of a process: that it ran when it was asked last."""

    name = "busy"

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def is_alive(self) -> bool:
        return True

    def terminate(self) -> None:
        """It does not heed it."""

    def join(self, _timeout: float) -> None:
        """It does not end."""
