"""Does /dev/shm hold what the ranks of one node exchange there? A pure function."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.doctor.findings import GIB, Finding, HazardName, failure, ok, warning
from holdfast.doctor.parallelism import Layout
from holdfast.workspace.plan import MIB

AMPLE_SHARED_BYTES = GIB
"""How much NCCL takes beside depends on how the GPUs are connected: one segment of 9.2 MiB for each
rank and more in https://github.com/NVIDIA/nccl/issues/1518, none where they reach each other
directly."""
QUEUE_CHUNKS = 10
ANSWER_CHUNK_BYTES = 24 * MIB
DEFAULT_CALL_CHUNK_MIB = 16


def shared_memory(
    free_bytes: int,
    layout: Layout,
    environment: Mapping[str, str],
    *,
    is_cpu_build: bool,
    remedy: str,
) -> Finding:
    """Whether the queues of a start fit, and what ranks exchange beside them."""
    name: HazardName = "shared-memory"
    seen = f"{free_bytes / MIB:.0f} MiB in /dev/shm"
    needed_bytes = least_shared_bytes(environment)
    if layout.has_worker_processes(is_cpu_build=is_cpu_build) and free_bytes < needed_bytes:
        return failure(
            name,
            f"{seen}, but vLLM needs {needed_bytes / MIB:.0f} MiB there for a queue.",
            remedy,
        )
    if layout.ranks <= 1 or free_bytes >= AMPLE_SHARED_BYTES:
        return ok(name, seen)
    return warning(
        name,
        f"{seen} for {layout.ranks} ranks: what they exchange in addition to vLLM's queues "
        "(NCCL's segments) may not fit, which ends a rank with a bus error.",
        remedy,
    )


def least_shared_bytes(environment: Mapping[str, str]) -> int:
    """The larger of the two queues of a worker, each of which has to fit alone when it is made.

    Each has ten chunks, with a byte for the writer and one for each reader. See `ShmRingBuffer` in
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/distributed/device_communicators/shm_broadcast.py.
    """
    given = environment.get("VLLM_MQ_MAX_CHUNK_BYTES_MB", "")
    call_mib = int(given) if given.isdigit() else DEFAULT_CALL_CHUNK_MIB
    return QUEUE_CHUNKS * (max(ANSWER_CHUNK_BYTES, call_mib * MIB) + 2)
