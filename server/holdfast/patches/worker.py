"""What is put in place of vLLM's code in a worker: compiled functions and seeded generators.

vLLM keeps what torch.compile made of a model, and asks what it loads to finish loading. Only what
its own backend has made can: on the CPU, where inductor compiles alone, that is a plain function
without `finalize_loading`, so each start compiles again (`_try_load_aot_compiled_fn`, 0.32;
keeping came with vllm-project/vllm#24274). A plain function is whole as soon as it is loaded.

vLLM samples for every request of a step, also for one whose prompt goes on in the next, and takes
the draw back by the generator's offset. A generator on the CPU has none: "CPU Generator does not
use offset", and the engine dies (`GPUModelRunner._bookkeeping_sync`, 0.32, 0.33; the way of drawing
came with vllm-project/vllm#10097). Without its generator such a request is sampled like one without
a seed, and its sample is discarded anyway.
"""

from __future__ import annotations

from typing import Any


def take_plain_functions() -> None:
    """Have vLLM in this process take a compiled function that has nothing left to load."""
    import torch  # noqa: PLC0415 - a worker has imported it

    load_compiled_function = torch.compiler.load_compiled_function

    def whole(*args: Any, **kwargs: Any) -> Any:
        loaded = load_compiled_function(*args, **kwargs)
        compiled = loaded._artifacts.compiled_fn  # noqa: SLF001 - where vLLM looks
        if not hasattr(compiled, "finalize_loading"):
            compiled.finalize_loading = _nothing_is_left
        return loaded

    torch.compiler.load_compiled_function = whole


def _nothing_is_left(_config: Any) -> None:
    """vLLM's `finalize_loading` of a function that was loaded whole."""


def keep_seeds(runner: Any) -> None:
    """Have a model runner on the CPU draw from a request's generator only what the request gets."""
    if runner.device.type != "cpu" or not hasattr(runner, "discard_request_mask"):
        return
    sample_tokens = runner.sample_tokens

    def sampled(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        if not batch.generators:
            return sample_tokens(*args, **kwargs)
        is_discarded = runner.discard_request_mask.np
        aside = {row: batch.generators[row] for row in batch.generators if is_discarded[row]}
        for row in aside:
            del batch.generators[row]
        try:
            return sample_tokens(*args, **kwargs)
        finally:
            batch.generators.update(aside)

    runner.sample_tokens = sampled
