"""What does the demo model need? An example of a reserver, and the demo's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from holdfast.demo import ARCHITECTURE
from holdfast.demo.switches import CONFIG_KEY, DemoSwitches, scratch_need_bytes, scratch_rows
from holdfast.workspace.plan import Term


class ReserverContext(Protocol):
    """The part of Holdfast's reserver context that the demo reads."""

    @property
    def hf_config(self) -> Any: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def max_num_batched_tokens(self) -> int: ...


def declare(context: ReserverContext) -> Iterable[Term]:
    """One term for the scratch of the largest prefill; nothing for other models."""
    if ARCHITECTURE not in (getattr(context.hf_config, "architectures", None) or ()):
        return ()
    switches = DemoSwitches.from_record(getattr(context.hf_config, CONFIG_KEY, {}))
    if not switches.declares_need:
        return ()
    rows = scratch_rows(context.max_model_len, context.max_num_batched_tokens)
    needed_bytes = scratch_need_bytes(rows, switches.scratch_bytes_per_token)
    return (Term("declared", "holdfast.demo: prefill scratch", needed_bytes),)
