"""The reserver of the demo model, which is also the example of a reserver."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.demo import ARCHITECTURE
from holdfast.demo.switches import CONFIG_KEY, DemoSwitches, scratch_need_bytes, scratch_rows
from holdfast.workspace.plan import Term
from holdfast.workspace.reservers import ReserverContext


def declare(context: ReserverContext) -> Iterable[Term]:
    """Declare the scratch memory of the largest prefill; nothing for other models."""
    if ARCHITECTURE not in (getattr(context.hf_config, "architectures", None) or ()):
        return ()
    switches = DemoSwitches.from_record(getattr(context.hf_config, CONFIG_KEY, {}))
    if not switches.declares_need:
        return ()
    rows = scratch_rows(context.max_model_len, context.max_num_batched_tokens)
    needed_bytes = scratch_need_bytes(rows, switches.scratch_bytes_per_token)
    return (Term("declared", "holdfast.demo: prefill scratch", needed_bytes),)
