"""Serves the front end's calls of a worker, other than its steps, and never raises.

If one worker raises, the answers of the others stay unread, and every later call gets the answer of
the one before (seen on vLLM 0.32, `MultiprocExecutor.collective_rpc`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.worker import adapters
from holdfast.workspace.plan import GrowthPolicy

logger = logging.getLogger("vllm.holdfast")

CALLABLE = frozenset(
    {"add_lora", "remove_lora", "pin_lora", "reload_weights", "save_sharded_state"}
)


def set_growth(wrapper: Any, policy: GrowthPolicy) -> dict[str, str]:
    """Set how requests for more workspace are treated; return the policy, or an error."""
    if wrapper.holdfast_hooks is None:
        return {"error": "the workspace plugin does not observe this rank"}
    wrapper.holdfast_hooks.set_growth(policy)
    return {"growth": policy}


def call(wrapper: Any, method: str, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Call a method of the worker in vLLM's wrapper; return its error, empty if none."""
    if method not in CALLABLE:
        return {"error": f"workers do not allow calls of {method}"}
    try:
        _call(wrapper.worker, method, arguments)
    except Exception as error:  # the edge of an RPC, see above
        text = f"{type(error).__name__}: {error}"
        # A mistyped path does not deserve a traceback in the log, except at the debug level.
        logger.warning("%s failed: %s", method, text, exc_info=logger.isEnabledFor(logging.DEBUG))
        return {"error": text}
    return {"error": ""}


def _call(worker: Any, method: str, arguments: Mapping[str, Any]) -> None:
    if method == "add_lora":
        from vllm.lora.request import LoRARequest  # noqa: PLC0415 - vLLM is only there in a worker

        # Rebuilt, because it crossed the wire as plain fields.
        adapters.load(worker, LoRARequest(**arguments))
        return
    if method == "save_sharded_state":  # which vLLM leaves to its callers
        Path(arguments["path"]).mkdir(parents=True, exist_ok=True)
    getattr(worker, method)(**arguments)
