"""The frozen records that cross a process or a layer; `labels` has the values of their labels.

Nothing here does anything: workers fill these through `holdfast.workspace.stats`, the probe and the
supervisor produce the rest, and `telemetry` and `api` turn them into Prometheus text and JSON.
Times are seconds of `time.monotonic()` unless the name says otherwise; sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from holdfast.labels import (
    GROWTH_PHASES,
    REJECTION_KINDS,
    DeathCause,
    GrowthPhase,
    MemoryKind,
    Outcome,
    RejectionKind,
    StartPhase,
    StepName,
)


@dataclass(frozen=True, slots=True)
class SlotStats:
    """One workspace: a (ubatch, lane) pair of one rank, with its size at the newest lock."""

    ubatch: int
    lane: int
    size_bytes: int
    reserved_bytes: int
    high_water_bytes: int
    high_water_caller: str
    locked_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Rejection:
    """A request for workspace that was refused."""

    kind: RejectionKind
    caller: str
    needed_bytes: int
    held_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class EngineStep:
    """One finished call of `execute_model`. `index` counts from 1 in each engine generation."""

    index: int
    scheduled_tokens: int
    requests: int
    started_seconds: float
    duration_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Where the memory of one rank went."""

    engine: int
    rank: int
    generation: int
    slots: tuple[SlotStats, ...] = ()
    retired_bytes: int = 0
    persistent_bytes: int = 0
    lamport_bytes: int | None = None
    """None where no Lamport all-reduce workspace was measured."""
    growth_limit_bytes: int | None = None
    """How much more than at the lock it may hold; None before that, and if it may not grow."""
    is_locked: bool = False
    is_sealed: bool = False
    growths: Mapping[GrowthPhase, int] = field(
        default_factory=lambda: dict.fromkeys(GROWTH_PHASES, 0)
    )
    rejections: Mapping[RejectionKind, int] = field(
        default_factory=lambda: dict.fromkeys(REJECTION_KINDS, 0)
    )
    last_rejection: Rejection | None = None
    callers: Mapping[str, int] = field(default_factory=dict)
    """The largest request of each caller in bytes, for at most 16 callers."""
    memory: Mapping[MemoryKind, int] = field(default_factory=dict)
    """Only the kinds that were measured."""
    fatal_error: str = ""
    """Why this rank is lost, written before the exception left the worker; empty if it is alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport(RankMemory):
    """What one rank says about itself, except its steps. It changes seldom."""

    pid: int
    phases: Mapping[StartPhase, float] = field(default_factory=dict)
    """When each phase of the start began, without those that did not."""
    nan_rows: int = 0
    """Rows of logits with a NaN, if vLLM counts them; one at most for a request in a step."""
    is_unified_memory: bool = False
    """Whether filling the device's memory fills the host's, as on GB10 and on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStats(RankReport):
    """What one rank wrote to its stats file, which is readable even after its death."""

    steps: int = 0
    scheduled_tokens: int = 0
    running_step_started_seconds: float | None = None
    last_step_ended_seconds: float | None = None
    recent_steps: tuple[EngineStep, ...] = ()
    """The newest steps, oldest first (at most `stats.RECENT_STEPS`)."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A request in one of the steps that may have ended an engine."""

    request_id: str
    """vLLM's internal id, which contains the id that the request was sent with."""
    reached_tokens: int
    """Its context at the end of the last of these steps: a replay that gets further is innocent."""
    is_prefill: bool
    """Whether that step processed a part of its prompt."""
    is_in_running_step: bool = True
    """False if all its steps had ended, the last one just before."""


@dataclass(frozen=True, slots=True)
class Death:
    """Why a generation of the engine ended."""

    cause: DeathCause
    reason: str
    """The process or rank, and its exception, for people."""
    blames_requests: bool = False
    """Whether a request may be the cause: of an exception, a rejection, a stall, or a signal that
    a process raises itself, such as SIGSEGV, but not of a signal from outside."""
    suspects: tuple[Suspect, ...] | None = None
    """The requests of the running steps, and of the last ones before them; None if unknown."""

    def __str__(self) -> str:
        return f"{self.cause}: {self.reason}"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the resolved vLLM configuration says about one engine generation."""

    model: str
    """The name that clients send as `model`."""
    world: tuple[tuple[int, int], ...]
    """Every (engine, rank) that must report."""
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    kv_capacity_tokens: int
    """Tokens that fit in the KV cache of one engine; 0 for a model without one."""
    kv_block_tokens: int
    vocab_size: int
    special_token_ids: frozenset[int]
    max_logprobs: int
    tasks: frozenset[str]
    """vLLM's supported tasks, for example `generate`, `embed`."""
    has_tokenizer: bool
    has_chat_template: bool
    has_prefix_caching: bool
    has_chunked_prefill: bool
    is_encoder_decoder: bool
    data_parallel_size: int
    is_unified_memory: bool
    """Whether the device shares its memory with the host, as on GB10."""
    fingerprint: str
    """Identifies everything that a learned reservation depends on."""
    max_queued_requests: int | None = None
    """vLLM's own limit of waiting and running requests; None if there is none."""
    has_sleep_mode: bool = False
    has_profiler: bool = False
    has_lora: bool = False
    largest_image: tuple[int, int] | None = None
    """Width and height of the image with the most tokens; None if the model accepts no images."""
    max_num_scheduled_tokens: int | None = None
    """The maximum tokens of one step, if that is less than `max_num_batched_tokens`."""
    draft_tokens: int = 0
    """Speculative tokens that a request adds to every step in which it decodes."""
    draft_slots: int = 0
    """What each request of a step takes of `max_num_batched_tokens` in addition to its tokens."""
    draft_lookahead_tokens: int = 0
    """Tokens beyond its own for which each request holds KV cache."""
    long_prefill_tokens: int | None = None
    """The maximum tokens of one prompt in a step with several requests; None if unlimited."""
    pipeline_stages: int = 1
    kv_watermark: float = 0.0
    """The share of the KV cache that must stay free when a request joins others."""
    kv_blocks: int = 0
    """The blocks of the KV caches of all engines together."""
    max_loras: int = 0
    """How many LoRA adapters one batch may have; 0 without LoRA."""
    least_cached_tokens: int = 0
    """How long a prompt is at least if the engine finds a part of it in its prefix cache."""
    max_answer_tokens: int | None = None
    """The most tokens that an answer may have, even if a client asks for more; None: no limit."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What is left of the host's memory."""

    available_bytes: int
    """Below the tighter limit, the host's own or that of a cgroup: see `guard.Reading`."""
    total_bytes: int
    """What that limit allows in all."""
    pressure_ratio: float | None
    """The share of the last two seconds in which some task below it waited; None if unknown."""


@dataclass(frozen=True, slots=True)
class BaselineComparison:
    """How the engine's log-probs compared with a baseline."""

    agrees: bool
    worst_nats: float
    """The largest absolute difference; infinity if the likeliest tokens are all others."""
    compared_seconds: float
    stray_token: int | None = None
    """The token that the engine took although the baseline demands another; else None."""


@dataclass(frozen=True, slots=True)
class ProbeStep:
    """What one step of the probe found."""

    name: StepName
    outcome: Outcome
    duration_seconds: float
    tokens: int = 0
    """The largest proven size: scheduled tokens of one engine step, or tokens of one context."""
    limited: bool = False
    """Whether a size was left out because of the journal, the time or the host's memory."""
    reason: str = ""
    """Why it failed, or was skipped or limited: step, size and caller."""


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """The outcome of one run of the suite."""

    suite: Literal["worst-case", "quick", "off"]
    passed: bool
    limited: bool
    proven_tokens: int
    """The longest context that was served completely."""
    duration_seconds: float
    steps: tuple[ProbeStep, ...]
    grew: bool = False
    """Whether a workspace grew while the suite ran."""
    slowest_step_seconds: float = 0.0
    is_whole: bool = True
    """Whether it was the suite, and not the one request that shows a proven engine again."""


@dataclass(frozen=True, slots=True)
class Lora:
    """One LoRA adapter, which requests name as their model."""

    name: str
    path: str
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class EngineReport:
    """The life of the engine, as `/statusz` and the metrics show it."""

    generation: int = 0
    restarts: int = 0
    starts: int = 0
    last_start_seconds: float | None = None
    last_exit: str = ""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node of several, as the head knows it."""

    name: str
    is_joined: bool
    ranks: tuple[tuple[int, int], ...] = ()
    """(engine, rank) of those that run there, or ran there last; none if it is not joined."""
    problem: str = ""
    """Why it is not joined; empty if it is."""


@dataclass(frozen=True, slots=True)
class Status:
    """Everything that is known at one moment. The source of health bodies and metrics."""

    state: str
    reason: str
    since_unix_seconds: float
    eta_seconds: float | None
    """The time until READY; for a start that takes longer than those before, a share of its time.
    """
    has_been_ready: bool
    engine: EngineReport
    probe: ProbeReport | None
    ranks: tuple[RankStats, ...]
    start_phases: Mapping[str, float] = field(default_factory=dict)
    """The duration of each phase of the last start."""
    detail: str = ""
    """The engine's own message, in addition to the reason; for operators, as it may name paths."""
    nodes: tuple[NodeStatus, ...] = ()
    """This node first; empty if the engine runs on this node alone."""
    nodes_wanted: int = 1
    has_engine: bool = False
    """Whether the ranks run; otherwise they are those of the last engine, as it ended."""
    ready_in_seconds: float | None = None
    """The time until READY if this start takes as long as those before; negative if it was over."""


@dataclass(frozen=True, slots=True)
class FollowerStatus:
    """Everything that a follower knows at one moment. The source of its health and metrics."""

    node: str
    state: str
    head: str
    """The address of its head."""
    is_connected: bool
    """Whether there is a connection to a head that has proven the key."""
    problem: str = ""
    """Why the last connection ended, or could not be made; empty once it has joined."""
    generation: int = 0
    """The generation that has processes here; 0 if there is none."""
    ranks: tuple[RankStats, ...] = ()
    """The ranks of that generation on this node."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What has to be equal on all nodes, without the model; see `nodes.messages.NodeFacts`."""
