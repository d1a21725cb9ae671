"""The embedded model: small, made on first use, and as demanding as DeepSeek-V4's prefill.

Runs in the engine's processes, with files that the front end makes before it starts them.
`register` is a `vllm.general_plugins` entry point, so the model also runs under `vllm serve`.
Nothing outside this package may know the model: reservers, probe and ledger treat it as any other.
"""

ARCHITECTURE = "HoldfastDemoForCausalLM"


def register() -> None:
    """Make the architecture known to vLLM by name; the model is imported when one is loaded."""
    from vllm.model_executor.models import ModelRegistry  # noqa: PLC0415 - heavy

    ModelRegistry.register_model(ARCHITECTURE, f"holdfast.demo.model:{ARCHITECTURE}")
