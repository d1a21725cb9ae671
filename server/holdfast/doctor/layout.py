"""The few flags of vLLM's that a hazard depends on, read without vLLM's parser."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_MEMORY_UTILIZATION = 0.92
"""vLLM's own, as its CacheConfig has it; a test compares them."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the engine is spread, and what of the GPU it takes."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    nodes: int = 1
    has_custom_all_reduce: bool = True
    captures_graphs: bool = True
    may_sleep: bool = False
    gpu_memory_utilization: float = DEFAULT_MEMORY_UTILIZATION

    @property
    def local_ranks(self) -> int:
        """Ranks that run on one node."""
        ranks = self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size
        return max(1, ranks // self.nodes)


def read_layout(arguments: Sequence[str]) -> Layout:
    """The layout that vLLM's flags ask for. What cannot be read is left at its default.

    A wrong value is for vLLM's parser to name, which knows all of its flags.
    """
    try:
        given, _ = _parser().parse_known_args(arguments)
    except argparse.ArgumentError:
        return Layout()
    return Layout(
        tensor_parallel_size=max(1, given.tensor_parallel_size),
        pipeline_parallel_size=max(1, given.pipeline_parallel_size),
        data_parallel_size=max(1, given.data_parallel_size),
        nodes=max(1, given.nnodes),
        has_custom_all_reduce=not given.disable_custom_all_reduce,
        captures_graphs=not given.enforce_eager,
        may_sleep=given.enable_sleep_mode,
        gpu_memory_utilization=given.gpu_memory_utilization,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag, short in (
        ("--tensor-parallel-size", "-tp"),
        ("--pipeline-parallel-size", "-pp"),
        ("--data-parallel-size", "-dp"),
        ("--nnodes", "-n"),
    ):
        parser.add_argument(short, flag, type=int, default=1)
    for flag in ("--disable-custom-all-reduce", "--enforce-eager", "--enable-sleep-mode"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument(
        "--gpu-memory-utilization",
        "--device-memory-utilization",
        type=float,
        default=DEFAULT_MEMORY_UTILIZATION,
    )
    return parser
