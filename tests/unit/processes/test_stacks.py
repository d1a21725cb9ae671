"""Stacks are read in whatever way works, and compilers are recognised."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from file_limits import no_more_files
from holdfast.processes import stacks as reader
from holdfast.processes.stacks import is_compiling, is_compiling_in_process, stacks_of
from servers import wait_until
from sleepers import begun

DEADLINE_SECONDS = 60.0
PYTHON = sys.executable
BUSY = """
import os, sys
from pathlib import Path
from holdfast.worker.lifetime import write_stacks_on_signal

def in_a_kernel_that_never_returns():
    print("busy", flush=True)
    while True:
        pass

if sys.argv[2] == "offers":
    write_stacks_on_signal(Path(sys.argv[1]), os.getpid())
in_a_kernel_that_never_returns()
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for what answers late on a machine that is busy."""
    monkeypatch.setattr(reader, "DEADLINE_SECONDS", DEADLINE_SECONDS)
    monkeypatch.setattr(reader, "_SIGNAL_DEADLINE_SECONDS", DEADLINE_SECONDS)
    monkeypatch.setattr(reader, "_POLL_SECONDS", 0.5)


@contextmanager
def busy(directory: Path, *, offers: bool = True) -> Iterator[psutil.Process]:
    """A Python process that does not come back."""
    command = [PYTHON, "-c", BUSY, str(directory), "offers" if offers else "mute"]
    with begun(command) as process:
        yield process


@pytest.fixture
def without_py_spy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where it is not installed."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))


def read_stacks(process: psutil.Process, directory: Path) -> str:
    """The stacks of one process."""
    return asyncio.run(stacks_of([process], directory))


def test_py_spy_reads_a_process_that_says_nothing(tmp_path: Path) -> None:
    """Nothing has to be prepared in it."""
    with busy(tmp_path, offers=False) as process:
        assert "in_a_kernel_that_never_returns" in read_stacks(process, tmp_path)


def test_py_spy_reads_a_stopped_process(tmp_path: Path) -> None:
    """A frozen worker shows where it froze, and stays frozen."""
    with busy(tmp_path) as process:
        process.suspend()
        wait_until(
            lambda: process.status() == psutil.STATUS_STOPPED,
            deadline_seconds=DEADLINE_SECONDS,
            what=process.status,
        )
        stacks = read_stacks(process, tmp_path)
        assert process.status() == psutil.STATUS_STOPPED
    assert "in_a_kernel_that_never_returns" in stacks
    assert f"Process {process.pid} (stopped)" in stacks


def test_without_py_spy_a_process_writes_its_own(tmp_path: Path, without_py_spy: None) -> None:
    """It writes them at each signal, and continues."""
    del without_py_spy
    directory = tmp_path / "1"
    directory.mkdir()
    with busy(directory) as process:
        assert read_stacks(process, directory).count("in_a_kernel_that_never_returns") == 1
        assert read_stacks(process, directory).count("in_a_kernel_that_never_returns") == 1
        assert process.is_running()


def test_a_process_that_would_not_understand_the_signal_is_not_sent_it(
    tmp_path: Path, without_py_spy: None
) -> None:
    """It would end it: one that still imports what registers the signal says nothing."""
    del without_py_spy
    with busy(tmp_path, offers=False) as process:
        assert "No stack" in read_stacks(process, tmp_path)
        assert process.status() in {psutil.STATUS_RUNNING, psutil.STATUS_SLEEPING}


def test_stacks_that_cannot_be_opened_are_no_error(tmp_path: Path, without_py_spy: None) -> None:
    """This process may have too many open files, and goes on."""
    del without_py_spy

    async def read(process: psutil.Process) -> str:
        with no_more_files():
            return await stacks_of([process], tmp_path)

    with busy(tmp_path) as process:
        stacks = asyncio.run(read(process))
        assert stacks == f"Process {process.pid}\nNo stack: the process does not answer."


def test_a_process_that_has_ended_is_no_error(tmp_path: Path) -> None:
    """It may end while it is asked."""
    with busy(tmp_path) as process:
        pass
    assert "has ended" in read_stacks(process, tmp_path)


COMPILES = """
import os, sys
from pathlib import Path
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from holdfast.worker.lifetime import write_stacks_on_signal

@triton.jit
def kernel(pointer, count: tl.constexpr):
    offsets = tl.arange(0, 256)
    values = tl.load(pointer + offsets)
    for turn in tl.static_range(count):
        values = tl.exp(values) + turn
    tl.store(pointer + offsets, values)

if len(sys.argv) > 1:
    write_stacks_on_signal(Path(sys.argv[1]), os.getpid())
for count in range(200, 10_000):
    source = ASTSource(kernel, {"pointer": "*fp32", "count": "constexpr"}, {(1,): count})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
"""


@pytest.mark.parametrize("has_py_spy", [True, False])
def test_a_compiler_inside_of_a_process_is_known_by_its_stack(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    has_py_spy: bool,
) -> None:
    """Triton's: no process has its name. It compiles for a GPU on any machine."""
    program = tmp_path / "compiles.py"
    program.write_text(COMPILES)
    variables = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    if not has_py_spy:
        request.getfixturevalue("without_py_spy")
    given = [] if has_py_spy else [str(tmp_path)]
    with subprocess.Popen([PYTHON, program, *given], env=variables) as started:
        process = psutil.Process(started.pid)
        try:
            wait_until(
                lambda: is_compiling_in_process(read_stacks(process, tmp_path)),
                deadline_seconds=2 * DEADLINE_SECONDS,
                what=lambda: read_stacks(process, tmp_path),
            )
        finally:
            started.kill()


LAUNCHES = """
import os, sys, time
from pathlib import Path
from triton.compiler import CompiledKernel
from holdfast.worker.lifetime import write_stacks_on_signal

kernel = CompiledKernel.__new__(CompiledKernel)
kernel.module, kernel._module_pid = object(), None
kernel.name, kernel.src, kernel.function, kernel.packed_metadata = "kernel", None, None, None
kernel._run = lambda *arguments: time.sleep(600)
write_stacks_on_signal(Path(sys.argv[1]), os.getpid())
kernel[1, 1, 1](stream=0)
"""
"""Triton launches a kernel that was compiled, and does not come back from it."""


@pytest.mark.parametrize("has_py_spy", [True, False])
def test_a_kernel_that_is_launched_and_hangs_is_not_a_compiler(
    tmp_path: Path, request: pytest.FixtureRequest, has_py_spy: bool
) -> None:
    """Triton launches in the file of its compiler."""
    program = tmp_path / "launches.py"
    program.write_text(LAUNCHES)
    if not has_py_spy:
        request.getfixturevalue("without_py_spy")
    with subprocess.Popen([PYTHON, program, str(tmp_path)]) as started:
        process = psutil.Process(started.pid)
        try:
            stacks = wait_until(
                lambda: found if "runner" in (found := read_stacks(process, tmp_path)) else None,
                deadline_seconds=2 * DEADLINE_SECONDS,
                what=lambda: read_stacks(process, tmp_path),
            )
        finally:
            started.kill()
    assert "triton/compiler/compiler.py" in stacks
    assert not is_compiling_in_process(stacks)


@pytest.mark.parametrize(
    "frame",
    [
        'File "/x/triton/compiler/compiler.py", line 1 in compile',
        "compile (triton/compiler/compiler.py:1)",
        "visit_Call (triton/compiler/code_generator.py:1)",
        'File "/x/triton/backends/nvidia/compiler.py", line 1 in make_llir',
        "compile (cutlass/base_dsl/compiler.py:1)",
        'File "/x/tilelang/engine/lower.py", line 1 in lower',
        "call_function (torch/_inductor/graph.py:1)",
        "codegen (torch/_inductor/codegen/triton.py:1)",
    ],
)
def test_a_compiler_is_known_by_its_frame(frame: str) -> None:
    """As py-spy writes it, and as the process does itself."""
    assert is_compiling_in_process(f"Thread 0x1\n    {frame}\n    main (run.py:1)")


@pytest.mark.parametrize(
    "frame",
    [
        'File "/x/triton/runtime/jit.py", line 1 in run',
        'File "/x/triton/compiler/compiler.py", line 1 in launch_metadata',
        "_init_handles (triton/compiler/compiler.py:1)",
        "run_with_argless_kernels (torch/_inductor/codegen/multi_kernel.py:1)",
        'File "/x/triton/backends/nvidia/driver.py", line 1 in __call__',
        'File "/x/cutlass/base_dsl/jit_executor.py", line 1 in run_compiled_program',
        "__call__ (torch/_inductor/output_code.py:1)",
    ],
)
def test_code_that_launches_what_is_compiled_does_not_compile(frame: str) -> None:
    """A kernel that hangs has these on its stack."""
    assert not is_compiling_in_process(frame)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cc1plus", True),
        ("x86_64-linux-gnu-g++-12", True),
        ("clang++-18", True),
        ("ninja", True),
        ("ptxas", True),
        ("nvrtc_compile", True),
        ("ld.lld", True),
        ("sleep", False),
        ("accountant", False),
    ],
)
def test_a_compiler_is_known_by_its_name(tmp_path: Path, name: str, expected: bool) -> None:
    """Whatever the distribution puts before or after it."""
    program = tmp_path / name
    shutil.copy(str(shutil.which("sleep")), program)
    with subprocess.Popen([program, "600"]) as process:
        try:
            started = psutil.Process(process.pid)
            wait_until(
                lambda: str(program) in started.cmdline(),
                deadline_seconds=DEADLINE_SECONDS,
                what=lambda: f"{name} does not run",
            )
            assert is_compiling([started]) is expected
        finally:
            process.kill()
    assert not is_compiling([])
