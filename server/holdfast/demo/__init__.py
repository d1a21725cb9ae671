"""The embedded model: small, made on first use, and as demanding as DeepSeek-V4's prefill.

Runs in the engine's processes, with `files` that the front end makes before it starts them.
`register` is a `vllm.general_plugins` entry point, so the model also runs under `vllm serve`.
Nothing outside this package may know the model: reservers, probe and ledger treat it as any other.

    files             the model as a directory
    trained, weights  its weights: trained ones, from `trained_weights/`, or random ones
    tokenizer         its tokens: bytes
    model, reserver   vLLM's Llama, with a prefill scratch that grows; how much that needs
    switches          what its configuration makes it do
    damages, steps    faults of its arithmetic, for checks to find; how a fault names its step
"""

ARCHITECTURE = "HoldfastDemoForCausalLM"


def register() -> None:
    """Make the architecture known to vLLM by name; the model is imported when one is loaded."""
    from vllm.model_executor.models import ModelRegistry  # noqa: PLC0415 - heavy

    ModelRegistry.register_model(ARCHITECTURE, f"holdfast.demo.model:{ARCHITECTURE}")
