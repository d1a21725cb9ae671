"""What vLLM's application is asked for the most: known before vLLM is loaded."""

from __future__ import annotations

FREQUENT_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/responses"}
)
