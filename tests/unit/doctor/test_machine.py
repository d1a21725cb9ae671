"""What is read of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.doctor.gpus import GpuFacts
from holdfast.doctor.machine import read_host_memory, read_machine
from machines import GIB, H100


def test_host_memory_is_read_as_vllm_reads_it() -> None:
    """Of one node, with what the kernel would free."""
    from vllm.utils.cpu_resource_utils import get_memory_node_info

    memory, theirs = read_host_memory(), get_memory_node_info()
    assert memory.total_bytes == theirs.total_memory
    assert memory.available_bytes == pytest.approx(theirs.available_memory, rel=0.2)


@pytest.mark.parametrize("limit", ["4294967296", "max"])
def test_host_memory_ends_at_the_limit_of_the_container(tmp_path: Path, limit: str) -> None:
    """What the container uses already is not available either."""
    cgroup = tmp_path / "sys" / "fs" / "cgroup"
    cgroup.mkdir(parents=True)
    (cgroup / "memory.max").write_text(limit)
    (cgroup / "memory.current").write_text(str(3 * GIB))
    memory = read_host_memory(tmp_path)
    assert (memory.total_bytes == 4 * GIB) is (limit != "max")
    assert memory.available_bytes <= GIB or limit == "max"


def test_the_compiler_is_looked_for_where_the_environment_says(tmp_path: Path) -> None:
    """PATH, CC and CXX are those of the environment that serves."""
    nowhere = read_machine({"PATH": str(tmp_path)}, None).missing_build_tools
    assert {"cc", "g++"} <= set(nowhere)
    for name in ("cc", "clang++"):
        (tmp_path / name).touch(mode=0o755)
    found_there = read_machine({"PATH": str(tmp_path)}, None).missing_build_tools
    assert not {"cc", "g++"} & set(found_there)
    named = read_machine({"PATH": str(tmp_path), "CXX": "icpx"}, None).missing_build_tools
    assert "icpx" in named


def test_ninja_is_looked_for_where_there_is_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer compiles with it, and vLLM serves without FlashInfer where it is missing."""
    environment = {"PATH": str(tmp_path)}
    monkeypatch.setattr("holdfast.doctor.machine.installed_version", lambda *_: "0.32.0")
    monkeypatch.setattr("holdfast.doctor.machine.find_gpus", GpuFacts)
    assert "ninja" not in read_machine(environment, None).missing_build_tools
    monkeypatch.setattr("holdfast.doctor.machine.find_gpus", lambda: GpuFacts((H100,)))
    assert "ninja" in read_machine(environment, None).missing_build_tools
    (tmp_path / "ninja").touch(mode=0o755)
    assert "ninja" not in read_machine(environment, None).missing_build_tools


def test_this_machine_is_read(tmp_path: Path) -> None:
    """What the checks look at is there, and the directory is found on its mount."""
    machine = read_machine({"A": "b"}, tmp_path / "not" / "yet")
    assert machine.environment == {"A": "b"}
    assert machine.memory.available_bytes > 0
    assert machine.shared_memory_free_bytes > 0
    directory = machine.state_directory
    assert directory is not None
    assert tmp_path.is_relative_to(directory.mount_point)
    assert directory.filesystem
    assert directory.is_writable


def test_a_place_that_cannot_be_looked_at_is_not_writable(tmp_path: Path) -> None:
    """As below a directory that this user may not enter, or where a name is too long."""
    directory = read_machine({}, tmp_path / ("s" * 300) / "state").state_directory
    assert directory is not None
    assert tmp_path.is_relative_to(directory.mount_point)


def test_a_directory_is_found_on_the_mount_that_it_would_be_made_on() -> None:
    """It need not exist; without one there is nothing to look for."""
    directory = read_machine({}, Path("/proc/holdfast")).state_directory
    assert directory is not None
    assert directory.filesystem == "proc"
    assert read_machine({}, None).state_directory is None
