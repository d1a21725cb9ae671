"""Keeps what torch builds for a starting rank beyond the engine's end, like compiled kernels.

vLLM has torch build its allocator for NCCL's symmetric memory (`VLLM_USE_NCCL_SYMM_MEM=1`) in the
temporary directory (`pynccl_allocator.compile_nccl_allocator`, 0.32, 0.33). That of an engine is
removed with it, so that every recovery would wait for a compiler.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

LOCK = "lock"
"""Torch waits for ever for the process that made this file (`torch.utils.file_baton`)."""


def directory_beside(generation_directory: Path) -> Path:
    """Where all generations of one server keep what was built."""
    return generation_directory.parent / "builds"


def prepare(generation_directory: Path) -> None:
    """Make the directory, and take away the lock of a build that was killed with its engine."""
    directory = directory_beside(generation_directory)
    directory.mkdir(mode=0o700, exist_ok=True)
    (directory / LOCK).unlink(missing_ok=True)


def keep_builds(generation_directory: Path) -> None:
    """Have vLLM in this process build where the next generation finds it."""
    from vllm.distributed.device_communicators import (  # noqa: PLC0415 - a worker has imported it
        pynccl_allocator,
    )

    directory = str(directory_beside(generation_directory))
    # All that this module asks of `tempfile`.
    pynccl_allocator.tempfile = SimpleNamespace(gettempdir=lambda: directory)
