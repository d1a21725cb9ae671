"""What a death is called, from what its processes left behind; and that an end is seen at once."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from file_limits import no_more_files
from holdfast.processes import deaths
from holdfast.processes.deaths import CoreProcess, DeathWatch, Evidence, classify
from holdfast.processes.exits import ProcessExit
from holdfast.records import Death, RankStats, Rejection, Suspect
from holdfast.worker.crash_records import NODE_FAILED, Cause
from holdfast.workspace.stats import StatsWriter
from sample_status import a_rank
from sleepers import sleeping

CORE, WORKER, PEER = 11, 22, 33
NAMES = {CORE: "EngineCore"}
SUSPECTS = (Suspect("poison-1a2b3c4d", 30, is_prefill=True),)
REFUSAL = "AssertionError: Workspace is locked but allocation from 'a.py:1:f' requires 2.00 MB"
DEADLINE_SECONDS = 60.0


def rank(
    number: int = 0, pid: int = WORKER, error: str = "", *, refused: bool = False
) -> RankStats:
    """What a rank last wrote."""
    rejection = Rejection("scratch", "a.py:1:f", 2, 1, "growth is off") if refused else None
    return a_rank(rank=number, pid=pid, fatal_error=error, last_rejection=rejection)


def cause(pid: int, logged: str, error: str) -> Cause:
    """An exception that a process logged a moment ago."""
    return Cause(pid, time.monotonic(), logged, error)


@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        (Evidence(NAMES, ranks=(rank(error=REFUSAL, refused=True),)), "workspace_rejection"),
        (Evidence(NAMES, ranks=(rank(error=REFUSAL),)), "worker_exception"),
        (Evidence(NAMES, ranks=(rank(error="ValueError: x", refused=True),)), "worker_exception"),
        (Evidence(NAMES, ranks=(rank(error="OutOfMemoryError: CUDA"),)), "out_of_memory"),
        (
            Evidence(NAMES, ranks=(rank(error="NanLogitsError: NaNs detected in logits"),)),
            "nan_logits",
        ),
        (
            Evidence(NAMES, ranks=(rank(error="RuntimeError: NaNs detected in logits: {}"),)),
            "nan_logits",
        ),
        (Evidence(NAMES, exits=(ProcessExit(CORE, -9),)), "core_exit"),
        (Evidence(NAMES, exits=(ProcessExit(WORKER, -9), ProcessExit(CORE, -9))), "core_exit"),
        (Evidence(NAMES, exits=(ProcessExit(CORE, None),)), "core_exit"),
        (Evidence(NAMES, exits=(ProcessExit(WORKER, -11),), ranks=(rank(),)), "worker_exit"),
        (Evidence(NAMES, exits=(ProcessExit(CORE, -9),), had_oom_kill=True), "out_of_memory"),
        (Evidence(NAMES, exits=(ProcessExit(WORKER, -11),), had_oom_kill=True), "worker_exit"),
        (Evidence(NAMES, exits=(ProcessExit(CORE, -15),)), "terminated"),
        (Evidence(NAMES, exits=(ProcessExit(CORE, 0),), was_terminated=True), "terminated"),
        (Evidence(NAMES, was_terminated=True), "terminated"),
        (Evidence(NAMES), "unknown"),
    ],
)
def test_a_death_has_the_name_of_its_cause(evidence: Evidence, expected: str) -> None:
    """Each cause is recognised by what the processes left."""
    assert classify(evidence).cause == expected


@pytest.mark.parametrize(
    "error",
    [
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.",
        "MemoryError: cannot allocate",
        "AcceleratorError: CUDA error: out of memory\nCUDA kernel errors might be reported",
        "RuntimeError: CUDA driver error: out of memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: CUDNN_STATUS_ALLOC_FAILED",
        "DistBackendError: NCCL error, NCCL version 2.27: Cuda failure 2 'out of memory'",
        "RuntimeError: Triton Error [CUDA]: out of memory",
        "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
    ],
)
def test_a_process_that_runs_out_of_memory_says_so_in_words_of_its_own(error: str) -> None:
    """torch, cuBLAS, cuDNN, NCCL, Triton and the driver."""
    assert classify(Evidence(NAMES, ranks=(rank(error=error),))).cause == "out_of_memory"


def test_an_error_of_cuda_that_is_not_of_memory_is_an_exception() -> None:
    """As most are."""
    found = rank(error="AcceleratorError: CUDA error: an illegal memory access was encountered")
    assert classify(Evidence(NAMES, ranks=(found,))).cause == "worker_exception"


def test_a_killed_worker_is_not_blamed_on_the_peer_that_lost_it() -> None:
    """The other rank fails in the collective; the first cause is the end of the worker."""
    ranks = (rank(0, PEER, "RuntimeError: Connection closed by peer"), rank(1, WORKER))
    death = classify(Evidence(NAMES, exits=(ProcessExit(WORKER, -9),), ranks=ranks))
    assert death.cause == "worker_exit"
    assert death.reason == "the worker of rank 1 of engine 0 (process 22) was killed by SIGKILL"


def test_a_worker_that_ends_after_its_own_exception_is_an_exception() -> None:
    """What a rank wrote before it ended is why it ended."""
    ranks = (rank(error="RuntimeError: no kernel image"),)
    death = classify(Evidence(NAMES, exits=(ProcessExit(WORKER, 1),), ranks=ranks))
    assert death.cause == "worker_exception"


def test_a_core_that_ends_after_its_own_exception_is_an_exception() -> None:
    """The scheduler raised: its exception is the reason, and an echo of it is not."""
    causes = (
        cause(WORKER, "WorkerProc failed.", "RuntimeError: cancelled"),
        cause(CORE, "EngineCore encountered a fatal error.", "KeyError: 'request'"),
    )
    death = classify(Evidence(NAMES, exits=(ProcessExit(CORE, 1),), causes=causes))
    assert death.cause == "worker_exception"
    assert death.reason == "process 11: KeyError: 'request'"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        # vLLM's words for a worker that ended before it was ready
        (
            "WorkerProc initialization failed due to an exception in a background process",
            "core_exit",
        ),
        ("ValueError: no kernel", "worker_exception"),
    ],
)
def test_a_start_on_another_node_in_which_nothing_raised_is_an_end(
    error: str, expected: str
) -> None:
    """A worker that was killed leaves no exception: the next start may succeed."""
    logged = f"{NODE_FAILED}: a rank could not start"
    causes = (cause(CORE, logged, f"EngineStartError: a rank could not start: {error}"),)
    evidence = Evidence(NAMES, exits=(ProcessExit(CORE, 3),), causes=causes)
    assert classify(evidence).cause == expected


def test_an_rpc_that_failed_before_is_not_why_a_core_was_killed() -> None:
    """A failed `add_lora` is logged as an exception and ends nothing."""
    causes = (cause(CORE, "Invocation of add_lora method failed", "ValueError: no such adapter"),)
    assert classify(Evidence(NAMES, exits=(ProcessExit(CORE, None),), causes=causes)).cause == (
        "core_exit"
    )


@pytest.mark.parametrize(
    ("evidence", "blames_requests"),
    [
        (Evidence(NAMES, ranks=(rank(error="ValueError: x"),)), True),
        (Evidence(NAMES, ranks=(rank(error=REFUSAL, refused=True),)), True),
        (Evidence(NAMES, exits=(ProcessExit(CORE, -11),)), True),
        (Evidence(NAMES, exits=(ProcessExit(WORKER, -6),), ranks=(rank(),)), True),
        (Evidence(NAMES, exits=(ProcessExit(WORKER, -7),)), True),
        (Evidence(NAMES, exits=(ProcessExit(WORKER, -8),)), True),
        (Evidence(NAMES, exits=(ProcessExit(CORE, 1), ProcessExit(WORKER, -4))), True),
        (Evidence(NAMES, exits=(ProcessExit(WORKER, -6), ProcessExit(CORE, None))), False),
        (Evidence(NAMES, exits=(ProcessExit(WORKER, -6), ProcessExit(CORE, -9))), False),
        (Evidence(NAMES, exits=(ProcessExit(CORE, -9),)), False),
        (Evidence(NAMES, exits=(ProcessExit(CORE, 1),)), False),
        (Evidence(NAMES, exits=(ProcessExit(CORE, -9),), had_oom_kill=True), False),
        (Evidence(NAMES, was_terminated=True), False),
    ],
)
def test_what_a_process_does_to_itself_accuses(evidence: Evidence, blames_requests: bool) -> None:
    """An exception, and a signal that does not come from outside; the suspects are named."""
    death = classify(replace(evidence, suspects={0: SUSPECTS}))
    assert death.blames_requests is blames_requests
    if blames_requests:
        assert death.suspects == SUSPECTS


def test_a_process_that_the_kernel_killed_names_what_it_ran() -> None:
    """It accuses nobody; what is there at the next death, too, is known with how far it came."""
    killed = (ProcessExit(WORKER, -9),)
    evidence = Evidence(NAMES, exits=killed, ranks=(rank(),), had_oom_kill=True)
    assert classify(replace(evidence, suspects={0: SUSPECTS})).suspects == SUSPECTS


def test_only_the_engine_that_died_has_suspects() -> None:
    """Of two engines the other one runs requests too."""
    others = (Suspect("other", 1, is_prefill=True),)
    ranks = (rank(0, WORKER, "ValueError: x"),)
    death = classify(Evidence(NAMES, ranks=ranks, suspects={0: SUSPECTS, 1: others}))
    assert death.suspects == SUSPECTS


def test_an_engine_that_ran_nothing_has_no_suspects_by_name() -> None:
    """What its core did between two steps may be for any request that it has."""
    death = classify(Evidence(NAMES, ranks=(rank(error="ValueError: x"),)))
    assert death.suspects is None


async def watched_death(
    directory: Path,
    process: subprocess.Popen[bytes],
    strike: Callable[[DeathWatch], None],
    *,
    has_errored: Callable[[], bool] = lambda: False,
) -> Death:
    """The death that a watch of one core tells of after `strike`."""
    core = {process.pid: CoreProcess("EngineCore", lambda: None)}
    known = [psutil.Process(process.pid)]
    watch = DeathWatch(directory, known, core, has_errored=has_errored)
    waiting = asyncio.create_task(watch.death())
    await asyncio.sleep(0)
    strike(watch)
    async with asyncio.timeout(DEADLINE_SECONDS):
        return await waiting


def test_the_end_of_a_process_is_seen(tmp_path: Path) -> None:
    """The reason names the signal that killed the process."""
    with sleeping() as process:
        death = asyncio.run(watched_death(tmp_path, process, lambda _: process.kill()))
    assert death.cause == "core_exit"
    assert death.reason == f"EngineCore (process {process.pid}) was killed by SIGKILL"


def test_an_engine_that_cannot_be_looked_at_is_not_dead(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Files are short for a while; its end is seen all the same."""
    looks = 0

    def has_errored() -> bool:
        nonlocal looks
        looks += 1
        with Path("/dev/null").open():
            return False

    async def scene(process: subprocess.Popen[bytes]) -> Death:
        core = {process.pid: CoreProcess("EngineCore", lambda: None)}
        known = [psutil.Process(process.pid)]
        watch = DeathWatch(tmp_path, known, core, has_errored=has_errored)
        waiting = asyncio.create_task(watch.death())
        await asyncio.sleep(0)
        with no_more_files():
            async with asyncio.timeout(DEADLINE_SECONDS):
                while looks < 4 and not waiting.done():  # noqa: ASYNC110 - it has no event
                    await asyncio.sleep(0.01)
        process.kill()
        async with asyncio.timeout(DEADLINE_SECONDS):
            return await waiting

    with sleeping() as process:
        death = asyncio.run(scene(process))
    assert death.cause == "core_exit"
    assert sum("cannot inspect" in record.getMessage() for record in caplog.records) == 1


def test_a_death_whose_causes_cannot_be_read_is_still_a_death(tmp_path: Path) -> None:
    """It has the name that its process gave it."""
    (tmp_path / "1.cause").mkdir()
    with sleeping() as process:
        death = asyncio.run(watched_death(tmp_path, process, lambda _: process.kill()))
    assert death.cause == "core_exit"


def test_an_error_of_vllm_is_explained_by_the_end_that_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM may know of it before the process has ended."""
    monkeypatch.setattr(deaths, "RECHECK_SECONDS", DEADLINE_SECONDS)
    with sleeping() as process:
        asked = 0

        def has_errored() -> bool:
            nonlocal asked
            asked += 1
            threading.Timer(0.2, process.kill).start()
            return True

        death = asyncio.run(
            watched_death(tmp_path, process, lambda _: None, has_errored=has_errored)
        )
    assert asked == 1
    assert death.cause == "core_exit"


def test_an_abort_that_nobody_asked_for_is_a_termination(tmp_path: Path) -> None:
    """The process still runs, and the death is known."""
    with sleeping() as process:
        death = asyncio.run(watched_death(tmp_path, process, DeathWatch.report_unexplained_abort))
        assert process.poll() is None
    assert death.cause == "terminated"


def test_a_rank_that_is_lost_is_seen_while_its_process_runs(tmp_path: Path) -> None:
    """vLLM would wait 300 s for it."""
    with (
        sleeping() as process,
        StatsWriter(tmp_path, engine=0, rank=1, generation=1) as writer,
    ):
        death = asyncio.run(
            watched_death(tmp_path, process, lambda _: writer.fatal_error("ValueError: x"))
        )
    assert death.cause == "worker_exception"
    assert death.reason == f"rank 1 of engine 0 (process {os.getpid()}): ValueError: x"
