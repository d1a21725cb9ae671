"""What vLLM keeps of a compiled model, and what Holdfast changes in taking it back."""

from __future__ import annotations

import inspect

import torch
from vllm.compilation import caching, compiler_interface, decorators
from vllm.platforms import cpu

from holdfast.patches import engine


def test_a_compiled_function_is_asked_to_finish_loading() -> None:
    """vLLM loads by this name of torch, and calls what a plain function does not have."""
    source = inspect.getsource(decorators._try_load_aot_compiled_fn)
    assert "torch.compiler.load_compiled_function(" in source
    assert "loaded_fn._artifacts.compiled_fn.finalize_loading(model.vllm_config)" in source
    (config,) = list(inspect.signature(engine._finalize_nothing).parameters)
    theirs = inspect.signature(caching.VllmSerializableFunction.finalize_loading)
    assert len(theirs.parameters) == len(["self", config])


def test_the_platform_configures_inductor_by_a_variable() -> None:
    """It is read when torch's inductor is imported, and is part of the key of a compiled model."""
    assert '"TORCHINDUCTOR_CPP_DYNAMIC_THREADS"] = "1"' in inspect.getsource(cpu)
    assert "save_config_portable()" in inspect.getsource(compiler_interface.get_inductor_factors)
    portable = torch._inductor.config.save_config_portable()
    assert "cpp.dynamic_threads" in portable
