"""What does a request occupy: the engine, the one thread that renders prompts, or neither?

A WebSocket is a session, which occupies the engine at times.

And which of vLLM's routes are an operator's?
"""

from __future__ import annotations

import re
from typing import Literal

from starlette.types import Scope

from holdfast.api.paths import below_root

Work = Literal["engine", "rendering", "session", "none"]

RENDERINGS = 4
"""So many that are answered without the engine are at work at a time. vLLM renders in one thread,
which each long chat needs too; the others are read or answered meanwhile."""

_READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_RENDERING_PATHS = frozenset(
    {
        "/tokenize",
        "/detokenize",
        "/v1/messages/count_tokens",
        "/v1/chat/completions/render",
        "/v1/chat/completions/derender",
        "/v1/completions/render",
        "/v1/completions/derender",
        "/v1/messages/render",
        "/v1/responses/render",
        "/cohere/v2/chat/render",
    }
)
OPERATOR_PATHS = frozenset(
    {
        # What an operator tells the engine: some of it is what a full engine waits for.
        "/abort_requests",
        "/inference/v1/abort_requests",
        "/pause",
        "/resume",
        "/sleep",
        "/wake_up",
        "/release_kv_cache_memory",
        "/reset_prefix_cache",
        "/reset_mm_cache",
        "/reset_encoder_cache",
        "/collective_rpc",
        "/start_profile",
        "/stop_profile",
        "/scale_elastic_ep",
        "/is_scaling_elastic_ep",
        "/fault_tolerance/apply",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/adapters",
        "/init_weight_transfer_engine",
        "/shutdown_weight_transfer_engine",
        "/start_weight_update",
        "/start_draft_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/update_weight_version",
        "/weight_checker",
        # What an operator asks of it.
        "/fault_tolerance/status",
        "/get_world_size",
        "/is_paused",
        "/is_sleeping",
        "/server_info",
        "/weight_info",
    }
)
"""vLLM's routes that act on the server, or on what other clients asked of it: not a client's."""
_ADAPTER = re.compile(r"/adapters/[^/]+")
"""As SageMaker names one of them."""
_CANCELLATION = re.compile(r"/v1/responses/[^/]+/cancel")


def work_of(scope: Scope, root_path: str = "") -> Work:
    """What a request may occupy. What is not known asks the engine."""
    if scope["type"] == "websocket":
        return "session"
    if scope["method"] in _READING_METHODS:
        return "none"
    path = below_root(scope["path"], root_path)
    if path in _RENDERING_PATHS:
        return "rendering"
    return "none" if is_for_operators(path) or _CANCELLATION.fullmatch(path) else "engine"


def is_for_operators(path: str) -> bool:
    """Whether vLLM would take a path, as `route_path` has it, for a route for operators."""
    # Starlette's routes end before a line feed, too.
    path = path.removesuffix("\n")
    return path in OPERATOR_PATHS or bool(_ADAPTER.fullmatch(path))
