"""Which requests ask the engine for work?"""

from __future__ import annotations

import re

from starlette.types import Scope

_READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_FREE_PATHS = frozenset(
    {
        # Answered by the front end alone.
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
        "/init_weight_transfer_engine",
        "/shutdown_weight_transfer_engine",
        "/start_weight_update",
        "/start_draft_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/update_weight_version",
        "/weight_checker",
    }
)
_CANCELLATION = re.compile(r"/v1/responses/[^/]+/cancel")


def asks_for_work(scope: Scope, root_path: str = "") -> bool:
    """Whether a request may occupy the engine. What is not known does, and so does a WebSocket."""
    if scope["type"] == "websocket":
        return True
    if scope["method"] in _READING_METHODS:
        return False
    path: str = scope["path"].removeprefix(scope.get("root_path", "") or root_path)
    return path not in _FREE_PATHS and not _CANCELLATION.fullmatch(path)
