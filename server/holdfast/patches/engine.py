"""Patches vLLM in the processes of its engine: EngineCores, workers, and the server they fork from.

Importing this module is cheap: each function imports what it changes.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from holdfast.patches import fits
from holdfast.patches.patch import original, replace

OPERATORS_DIRECTORY_VARIABLE = "HOLDFAST_OPERATORS_TMPDIR"
"""Tells the processes of an engine, which have a `TMPDIR` of their own, that of the server."""
BUILD_LOCK = "lock"
"""Torch waits without a deadline for the process that made this file (`torch.utils.file_baton`)."""


def import_engine() -> None:
    """Import what an EngineCore and the platform's workers run, but no plugin.

    This initialises no device where vLLM finds its GPUs by NVML (0.32, 0.33).
    """
    for name in (
        "vllm.v1.engine.core",
        "vllm.v1.executor.multiproc_executor",
        "vllm.v1.executor.uniproc_executor",
        "vllm.v1.structured_output",
        "vllm.v1.worker.worker_base",
        _worker_module(),
    ):
        importlib.import_module(name)


def _worker_module() -> str:
    """The module of the platform's worker class, as its `check_and_update_config` names it."""
    from vllm.platforms import current_platform  # noqa: PLC0415 - see the module's docstring

    return f"vllm.v1.worker.{'cpu' if current_platform.is_cpu() else 'gpu'}_worker"


def fork_workers(context: Any) -> None:
    """Have this EngineCore start its workers in the `multiprocessing` context `context`.

    `get_mp_context` is bound in `vllm.v1.executor.multiproc_executor` (0.32, 0.33).
    """
    from vllm.v1.executor import multiproc_executor  # noqa: PLC0415 - as above

    if not fits("patches.engine.fork_workers"):
        return
    original = multiproc_executor.get_mp_context

    def forking_context() -> Any:
        original()  # prepares the environment of the processes to come
        return context

    multiproc_executor.get_mp_context = forking_context


def builds_directory(generation_directory: Path) -> Path:
    """The directory in which all generations of one server keep what they built."""
    return generation_directory.parent / "builds"


def prepare_builds(generation_directory: Path) -> None:
    """Make that directory, and remove the lock of a build that was killed with its engine."""
    directory = builds_directory(generation_directory)
    directory.mkdir(mode=0o700, exist_ok=True)
    (directory / BUILD_LOCK).unlink(missing_ok=True)


def keep_builds(generation_directory: Path) -> None:
    """Have vLLM in this process build its NCCL allocator where the next generation finds it.

    With `VLLM_USE_NCCL_SYMM_MEM=1`, torch builds it in the temporary directory
    (`pynccl_allocator.compile_nccl_allocator`, 0.32, 0.33). An engine's temporary directory is
    removed with the engine, so every recovery would wait for a compiler.
    """
    if not fits("patches.engine.keep_builds"):
        return
    from vllm.distributed.device_communicators import pynccl_allocator  # noqa: PLC0415 - as above

    directory = str(builds_directory(generation_directory))
    # `gettempdir` is all that the module uses of `tempfile`.
    pynccl_allocator.tempfile = SimpleNamespace(gettempdir=lambda: directory)


def find_weight_cache() -> None:
    """Have vLLM in this process look for the daemon of its weight cache where the operator runs it.

    The daemon has its socket in its temporary directory (`weight_cache.protocol.get_socket_dir`,
    0.32, 0.33). An engine has a temporary directory of its own, so it would not find the daemon and
    read the weights from disk.
    """
    directory = os.environ.get(OPERATORS_DIRECTORY_VARIABLE)
    if directory is None or not fits("patches.engine.find_weight_cache"):
        return
    from vllm.model_executor.model_loader.weight_cache import protocol  # noqa: PLC0415 - as above

    # `gettempdir` is all that the module uses of `tempfile`.
    protocol.tempfile = SimpleNamespace(gettempdir=lambda: directory)


def accept_plain_functions() -> None:
    """Have vLLM in this process load a compiled function that is a plain one.

    vLLM keeps what torch.compile made of a model, and calls `finalize_loading` of what it loads.
    Only the functions of vLLM's own backend have that. On the CPU, where inductor compiles alone,
    it is a plain function, so every start compiles again (`_try_load_aot_compiled_fn`, 0.32; vLLM
    keeps functions since vllm-project/vllm#24274). A plain function is complete once it is loaded.
    """
    if not fits("patches.engine.accept_plain_functions"):
        return
    import torch  # noqa: PLC0415 - as above

    load_compiled_function = torch.compiler.load_compiled_function

    def load(*args: Any, **kwargs: Any) -> Any:
        loaded = load_compiled_function(*args, **kwargs)
        compiled = loaded._artifacts.compiled_fn  # noqa: SLF001 - where vLLM looks
        if not hasattr(compiled, "finalize_loading"):
            compiled.finalize_loading = _finalize_nothing
        return loaded

    torch.compiler.load_compiled_function = load


def _finalize_nothing(_config: Any) -> None:
    """vLLM's `finalize_loading` for a function that is complete once it is loaded."""


def read_notifications() -> None:
    """Have this process free the notifications that its message queues get while it is busy.

    The reader of such a queue looks at its socket only after a second without a message
    (`SpinCondition.wait`, 0.32). The socket keeps one notification, but ZeroMQ keeps 40 bytes for
    each that comes until the reader looks. From 0.33 on, it also looks every other second.
    """
    if not fits("patches.engine.read_notifications"):
        return
    import zmq  # noqa: PLC0415 - as above
    from vllm.distributed.device_communicators import shm_broadcast  # noqa: PLC0415 - as above

    if hasattr(shm_broadcast, "SHM_NOTIFY_POLL_INTERVAL_S"):
        return
    condition_type = shm_broadcast.SpinCondition
    record_as_vllm = original(condition_type, "record_read")

    def record_read(condition: Any) -> None:
        before_seconds = condition.last_read
        record_as_vllm(condition)
        if int(condition.last_read) != int(before_seconds):
            condition.local_notify_socket.get(zmq.EVENTS)

    replace(condition_type, "record_read", record_read)


def mark_nan_rows(vllm_config: Any) -> None:
    """Have this process's model runner mark a request with a NaN in its logits, not count its NaNs.

    vLLM makes a mask of the logits and adds it up (V1), or has one program read a whole row (V2).
    A greatest value takes one pass: of 64 rows, 20 us of an H200, not 54 or 39
    (`count_nans_per_row`, `get_num_nans`, 0.32, 0.33).

    With speculation a request has one row more for each draft, but vLLM gives each request one row,
    in the order of the rows: those of the first requests stand for all.
    """
    if vllm_config.use_v2_model_runner:
        mark_nan_rows_of_v2()
    else:
        mark_nan_rows_of_v1()


def mark_nan_rows_of_v1() -> None:
    """Apply `mark_nan_rows` to the V1 runner, whose module a worker of the other never imports.

    It counts in `sample_tokens`, after `_sample` and without what that is told about drafts.
    """
    if not fits("patches.engine.mark_nan_rows_of_v1"):
        return
    from vllm.v1.worker import gpu_model_runner  # noqa: PLC0415 - as above

    sample = original(gpu_model_runner.GPUModelRunner, "_sample")
    row_bounds: Any = None

    def sample_and_remember(runner: Any, logits: Any, drafts: Any) -> Any:
        nonlocal row_bounds
        row_bounds = None if drafts is None else _with_zero(drafts.cu_num_sampled_tokens)
        return sample(runner, logits, drafts)

    def marked(logits: Any) -> Any:
        marks = marked_nan_rows(logits)
        return marks if row_bounds is None else _by_request(marks, row_bounds)

    replace(gpu_model_runner.GPUModelRunner, "_sample", sample_and_remember)
    gpu_model_runner.count_nans_per_row = marked


def mark_nan_rows_of_v2() -> None:
    """Apply `mark_nan_rows` to the V2 runner, which has reduced the marks of a sharded batch."""
    if not fits("patches.engine.mark_nan_rows_of_v2"):
        return
    from vllm.v1.worker.gpu import model_runner  # noqa: PLC0415 - as above
    from vllm.v1.worker.gpu.sample import sampler  # noqa: PLC0415 - as above
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler  # noqa: PLC0415 - as above

    sample = original(model_runner.GPUModelRunner, "sample")

    def sample_and_reduce(runner: Any, hidden_states: Any, batch: Any, grammar: Any) -> Any:
        sampled = sample(runner, hidden_states, batch, grammar)
        output, *_ = sampled
        if output.num_nans is not None and len(output.num_nans) != batch.num_reqs:
            output.num_nans = _by_request(output.num_nans, batch.cu_num_logits)
        return sampled

    sampler.get_num_nans = marked_nan_rows
    rejection_sampler.get_num_nans = marked_nan_rows
    replace(model_runner.GPUModelRunner, "sample", sample_and_reduce)


def marked_nan_rows(logits: Any) -> Any:
    """Return 1 for each row of logits with a NaN, otherwise 0: int32, on their device.

    The greatest value of a row is NaN if any value is (`torch.amax`).
    """
    return logits.amax(dim=-1).isnan().int()


def _by_request(marks: Any, row_bounds: Any) -> Any:
    """Add up the marks of each request's rows, which end where those of the next one begin."""
    return _with_zero(marks.cumsum(0))[row_bounds].diff()


def _with_zero(sums: Any) -> Any:
    """Return running sums with the 0 that they begin with."""
    from torch.nn.functional import pad  # noqa: PLC0415 - as above

    return pad(sums, (1, 0))


def withhold_unused_seeds(runner: Any) -> None:
    """Have a model runner on the CPU use no request's generator for a sample that it discards.

    vLLM samples for every request of a step, even if the rest of its prompt follows in the next
    one, and then turns the generator back by its offset. A CPU generator has no offset, so the
    engine dies: "CPU Generator does not use offset" (`GPUModelRunner._bookkeeping_sync`, 0.32,
    0.33, since vllm-project/vllm#10097). Without its generator the request is sampled as if it had
    no seed.
    """
    if runner.device.type != "cpu" or not hasattr(runner, "discard_request_mask"):
        return
    sample_tokens = runner.sample_tokens

    def sample(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        if not batch.generators:
            return sample_tokens(*args, **kwargs)
        is_discarded = runner.discard_request_mask.np
        withheld = {row: batch.generators[row] for row in batch.generators if is_discarded[row]}
        for row in withheld:
            del batch.generators[row]
        try:
            return sample_tokens(*args, **kwargs)
        finally:
            batch.generators.update(withheld)

    runner.sample_tokens = sample
