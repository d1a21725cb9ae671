"""The flags of vLLM that a hazard depends on, read without vLLM's parser."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from holdfast.engine.unsupported import refuse_nodes
from holdfast.errors import UsageError

DEFAULT_MEMORY_UTILIZATION = 0.92
"""The default of vLLM's CacheConfig; a test compares them."""
_WITHOUT_GRAPHS = re.compile(
    r'(-cc|--compilation-config)\.cudagraph_mode[= ]none\b|"cudagraph_mode"\s*:\s*"none"',
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Layout:
    """How many ranks the engine has, and what it does to the GPUs of this node."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    executor: str = ""
    """The value of `--distributed-executor-backend`; empty if vLLM chooses."""
    has_custom_all_reduce: bool = True
    captures_graphs: bool = True
    compiles: bool = True
    may_sleep: bool = False
    has_cumem_allocator: bool = False
    has_kv_connector: bool = False
    has_kv_cache_size: bool = False
    """Whether the size of the KV cache is given in bytes, not as a share of the memory."""
    gpu_memory_utilization: float = DEFAULT_MEMORY_UTILIZATION
    device_ids: tuple[int, ...] | tuple[str, ...] = ()
    """The visible GPUs, or the UUIDs of GPUs, that ranks take; empty if they take the first."""
    nodes: int = 1
    master_address: str = ""
    """An address of the head that the other nodes reach; empty if it is not given."""

    @property
    def ranks_everywhere(self) -> int:
        """The number of ranks on all nodes."""
        return (
            self.tensor_parallel_size
            * self.pipeline_parallel_size
            * self.prefill_context_parallel_size
            * self.data_parallel_size
        )

    @property
    def ranks(self) -> int:
        """The number of ranks on this node, unless Ray places them: each node has as many."""
        return max(1, self.ranks_everywhere // self.nodes)

    @property
    def flags_of_ranks(self) -> tuple[str, ...]:
        """The flags that ask for more than one rank."""
        sizes = {
            "--tensor-parallel-size": self.tensor_parallel_size,
            "--pipeline-parallel-size": self.pipeline_parallel_size,
            "--prefill-context-parallel-size": self.prefill_context_parallel_size,
            "--data-parallel-size": self.data_parallel_size,
        }
        return tuple(flag for flag, size in sizes.items() if size > 1)

    @property
    def has_ray(self) -> bool:
        """Whether Ray decides which node a rank runs on."""
        return self.executor == "ray"

    def has_worker_processes(self, *, is_cpu_build: bool) -> bool:
        """Return whether every rank is a process that answers through /dev/shm.

        The CPU build starts a process even for a single rank
        (https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/platforms/cpu.py).
        """
        if self.executor in {"", "uni"}:
            return is_cpu_build or (not self.executor and self.ranks_everywhere > 1)
        return self.executor == "mp"


def read_layout(arguments: Sequence[str]) -> Layout:
    """Read the layout from vLLM's flags.

    Raises:
        UsageError: the value of one of these flags is invalid, or the engine would need several
            nodes.
    """
    try:
        given, _ = _parser().parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UsageError(f"{error}.", remedy="see `holdfast serve --help=all`.") from None
    refuse_nodes(
        nodes=given.nnodes,
        replicas=given.data_parallel_size,
        local_replicas=given.data_parallel_size_local,
    )
    return Layout(
        tensor_parallel_size=max(1, given.tensor_parallel_size),
        pipeline_parallel_size=max(1, given.pipeline_parallel_size),
        data_parallel_size=max(1, given.data_parallel_size),
        prefill_context_parallel_size=max(1, given.prefill_context_parallel_size),
        executor=given.distributed_executor_backend,
        has_custom_all_reduce=not given.disable_custom_all_reduce,
        captures_graphs=not given.enforce_eager and not _WITHOUT_GRAPHS.search(" ".join(arguments)),
        compiles=not given.enforce_eager,
        may_sleep=given.enable_sleep_mode,
        has_cumem_allocator=given.enable_cumem_allocator or given.enable_sleep_mode,
        has_kv_connector=_has_kv_connector(arguments),
        has_kv_cache_size=given.demo or given.kv_cache_memory_bytes is not None,
        gpu_memory_utilization=given.gpu_memory_utilization,
        device_ids=given.device_ids,
        nodes=max(1, given.nnodes),
        master_address=given.master_addr,
    )


def _has_kv_connector(arguments: Sequence[str]) -> bool:
    # The value is JSON, or one part of it: `--kv-transfer-config.kv_connector=NixlConnector`.
    return any(argument.startswith("--kv-transfer-config") for argument in arguments) and any(
        "kv_connector" in argument for argument in arguments
    )


def _share(text: str) -> float:
    """Parse a share; an ArgumentTypeError for what vLLM refuses, such as `nan`."""
    with suppress(ValueError):
        if 0 < (share := float(text)) <= 1:
            return share
    raise argparse.ArgumentTypeError(f"expected a number above 0 and at most 1, not {text!r}")


def _device_ids(text: str) -> tuple[int, ...] | tuple[str, ...]:
    """Parse GPUs as vLLM does; an ArgumentTypeError for what it refuses."""
    names = tuple(part.strip() for part in text.split(","))
    numbers = tuple(int(name) for name in names if name.isdigit())
    given = numbers or names
    if len(set(given)) < len(names):
        raise argparse.ArgumentTypeError(
            f"expected numbers or UUIDs of GPUs, not both and each once, not {text!r}"
        )
    return given


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag, short in (
        ("--tensor-parallel-size", "-tp"),
        ("--pipeline-parallel-size", "-pp"),
        ("--data-parallel-size", "-dp"),
        ("--prefill-context-parallel-size", "-pcp"),
        ("--nnodes", "-n"),
    ):
        parser.add_argument(short, flag, type=int, default=1)
    parser.add_argument("--data-parallel-size-local", "-dpl", type=int)
    for flag in (
        "--disable-custom-all-reduce",
        "--enforce-eager",
        "--enable-sleep-mode",
        "--enable-cumem-allocator",
        "--demo",
    ):
        parser.add_argument(flag, action="store_true")
    for flag in ("--distributed-executor-backend", "--master-addr"):
        parser.add_argument(flag, default="")
    # vLLM's log advises the second name, which is an abbreviation to its parser.
    parser.add_argument("--kv-cache-memory-bytes", "--kv-cache-memory")
    parser.add_argument("--device-ids", type=_device_ids, default=())
    parser.add_argument(
        "--gpu-memory-utilization",
        "--device-memory-utilization",
        type=_share,
        default=DEFAULT_MEMORY_UTILIZATION,
    )
    return parser
