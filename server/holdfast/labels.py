"""The closed sets of values that labels of metrics, records and routes can have.

A new value goes here first: what must know all of them takes them from here, and tests compare the
docs with them.
"""

from __future__ import annotations

from typing import Literal, get_args

GrowthPhase = Literal["warmup", "sealed", "locked"]
RejectionKind = Literal["scratch", "persistent", "permute"]
MemoryKind = Literal[
    "weights",
    "kv_cache",
    "workspace",
    "activation_peak",
    "cuda_graphs",
    "non_torch",
    "budget",
    "total",
]
StartPhase = Literal["import", "load", "kv_sizing", "kv_cache", "warmup", "locked"]
StepName = Literal[
    "first_token",
    "context_sweep",
    "full_context",
    "prefix_continuation",
    "batch_sweep",
    "full_batch",
    "widest_decode",
    "mixed",
    "baseline",
    "first_sampling",
    "first_image",
    "first_adapter",
]
Outcome = Literal["passed", "failed", "skipped"]
DeathCause = Literal[
    "workspace_rejection",
    "worker_exception",
    "worker_exit",
    "core_exit",
    "out_of_memory",
    "host_memory",
    "nan_logits",
    "stall",
    "terminated",
    "node_lost",
    "start_failure",
    "requested",
    "unknown",
]
MemoryAction = Literal["hold", "give_up", "end"]
"""What is done while the host is short of memory: a long prompt waits, a long prompt is given up,
the engine is ended."""
BaselineCheck = Literal["probe", "canary"]
RecycleReason = Literal["age", "host_memory", "requests"]
"""The limit of `--recycle-after` that an engine has reached."""
SleepLevel = Literal[1, 2]
SleepTag = Literal["weights", "kv_cache"]
CacheKind = Literal["prefix", "mm", "encoder"]
LossReason = Literal[
    "stream_broken",
    "not_replayable",
    "suspected",
    "quarantined",
    "key_suspended",
    "engine_lost",
    "drained",
]
VerifyVerdict = Literal["passed", "failed", "inconclusive"]
ToolCallDefect = Literal["invalid_json", "unknown_name", "schema_mismatch"]
"""Why no client can use a tool call of the model, as OpenRouter classes them."""
RefusalReason = Literal[
    # `api.gate`, by the state, the queue and the key, as `api.admission` decides
    "not_ready",
    "draining",
    "failed",
    "overloaded",
    "key_concurrency",
    "key_suspended",
    # `api.quotas`, by the limits of the key
    "key_request_rate",
    "key_daily_tokens",
    # `api.auth`
    "unauthorized",
    "forbidden",
    # `listener.http_connection`; for JSON that is `malformed` it is `api.limits`
    "malformed",
    "url_too_long",
    "too_many_headers",
    "headers_too_large",
    "body_too_large",
    # `listener.bounded_connection`, by its deadlines
    "slow_headers",
    "slow_body",
    "slow_reader",
    # any connection of `listener`, and its acceptor: to make room, or after a silence
    "idle_connection",
    "too_many_connections",
    # `api.limits`, with `api.body_cost`; for WebSockets `listener.websocket_connection` and
    # `api.message_limits`
    "buffers_full",
    "json_too_deep",
    "json_too_large",
    "timed_out",
    # vLLM, in a form that `api.errors` gives it
    "unsupported_media_type",
]
"""Why a request or a connection was refused before the engine, under the module that refuses it.

Before the gate, and not counted here, refuse: `api.router` (405, the method of a route of ours),
`api.admin` (what an operator may not do now), `api.request_log` (500, our own mistakes) and
`status_page` (503, one viewer too many; 404, a file that the page does not have).

After the gate, and not counted here, refuse: `engine.suspects.blame` (422, what ended engines),
`engine.requests.long_prompts` (429, for lack of host memory), `engine.requests.missing_vectors`
(500, a pooling request on which the engine fails), `engine.grammars` and `engine.media` (what costs
too much), `engine.checked_llm` with `patches.parameters`, `patches.tokenizer`, `patches.harmony`,
`patches.pooling`, `patches.responses`, `patches.templates` and `patches.request_bodies` (400, what
vLLM does not bound), `patches.adapters` (404, names that lead out of the adapters' directory),
`engine.worker_adapters` (404, an adapter that is gone), `patches.answer_parsing` (422, an answer
that takes too long to read), and vLLM itself.

vLLM itself also gives 400 to a request that is longer than what was proven, because
`lifecycle.proof` lowers vLLM's limit through `engine.proxy`. Where vLLM's own queue is full,
`engine.checked_llm` makes its refusal a 429.

A request that gave its capacity back may be refused by `api.gate` when `engine.requests.request` or
`engine.vllm_errors` asks for it again. That counts here.
"""
NodeRefusalReason = Literal[
    # any connection to the node port, or from it
    "too_many_peers",
    "too_slow",
    "malformed",
    "oversized",
    "wrong_protocol",
    "wrong_key",
    "forged",
    # a follower that has the key
    "different",
    "name_taken",
    "not_needed",
]
"""Why a connection between head and follower was refused."""

GROWTH_PHASES: tuple[GrowthPhase, ...] = get_args(GrowthPhase)
REJECTION_KINDS: tuple[RejectionKind, ...] = get_args(RejectionKind)
MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)
START_PHASES: tuple[StartPhase, ...] = get_args(StartPhase)
DEATH_CAUSES: tuple[DeathCause, ...] = get_args(DeathCause)
MEMORY_ACTIONS: tuple[MemoryAction, ...] = get_args(MemoryAction)
RECYCLE_REASONS: tuple[RecycleReason, ...] = get_args(RecycleReason)
SLEEP_TAGS: frozenset[SleepTag] = frozenset(get_args(SleepTag))
LOSS_REASONS: tuple[LossReason, ...] = get_args(LossReason)
TOOL_CALL_DEFECTS: tuple[ToolCallDefect, ...] = get_args(ToolCallDefect)
REFUSAL_REASONS: tuple[RefusalReason, ...] = get_args(RefusalReason)
NODE_REFUSAL_REASONS: tuple[NodeRefusalReason, ...] = get_args(NodeRefusalReason)
PROBE_STEPS: tuple[StepName, ...] = get_args(StepName)
QUICK_STEPS: tuple[StepName, ...] = ("first_token", "full_context", "full_batch", "baseline")
