"""Requests with a seed on the CPU: their generators are not drawn from in vain.

vLLM samples for every request of a step, also for one whose prompt goes on in the next, and takes
the draw back by the generator's offset. A generator on the CPU has none: "CPU Generator does not
use offset", and the engine dies (`GPUModelRunner._bookkeeping_sync`, 0.32, 0.33; the way of drawing
came with vllm-project/vllm#10097). Without its generator such a request is sampled like one without
a seed, and what comes out is discarded as it is anyway.
"""

from __future__ import annotations

from typing import Any


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
