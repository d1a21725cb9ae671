"""What was compiled once is loaded at the next start, on the CPU too.

vLLM keeps what torch.compile made of a model, and asks what it loads to finish loading. Only what
its own backend has made can: on the CPU, where inductor compiles alone, that is a plain function
without `finalize_loading`, so each start compiles anew (`_try_load_aot_compiled_fn`, 0.32;
keeping came with vllm-project/vllm#24274). A plain function is whole as soon as it is loaded.
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
