"""Answers what the front end asks of a worker beside its steps, never with an exception.

One worker that raises leaves the answers of the others unread, and every later call gets the answer
of the one before (seen on vLLM 0.32, `MultiprocExecutor.collective_rpc`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger("vllm.holdfast")

CALLABLE = frozenset(
    {"add_lora", "remove_lora", "pin_lora", "reload_weights", "save_sharded_state"}
)


def call(wrapper: Any, method: str, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Call a method of the worker in vLLM's wrapper; return its error, empty if none."""
    if method not in CALLABLE:
        return {"error": f"workers do not allow calls of {method}"}
    try:
        getattr(wrapper.worker, method)(**_as_vllm_takes_them(method, arguments))
    except Exception as error:  # the edge of an RPC, see above
        told = f"{type(error).__name__}: {error}"
        # A mistyped path does not deserve a traceback in the log, except at the debug level.
        logger.warning("%s failed: %s", method, told, exc_info=logger.isEnabledFor(logging.DEBUG))
        return {"error": told}
    return {"error": ""}


def _as_vllm_takes_them(method: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rebuild the objects that crossed the wire as plain fields."""
    if method == "save_sharded_state":  # which vLLM leaves to its callers
        Path(arguments["path"]).mkdir(parents=True, exist_ok=True)
    if method != "add_lora":
        return arguments
    from vllm.lora.request import LoRARequest  # noqa: PLC0415 - vLLM is only there in a worker

    return {"lora_request": LoRARequest(**arguments)}
