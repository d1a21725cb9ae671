"""An idle engine, its facts and its clock, for fakes and tests that need no more of an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from holdfast.engine.baseline import CanaryAnswer
from holdfast.labels import SLEEP_TAGS, CacheKind, SleepLevel, SleepTag
from holdfast.records import EngineFacts, Suspect

FACTS = EngineFacts(
    model="fake",
    world=((0, 0),),
    max_model_len=1001,
    max_num_batched_tokens=512,
    max_num_seqs=8,
    kv_capacity_tokens=4096,
    kv_block_tokens=16,
    vocab_size=300,
    special_token_ids=frozenset({0, 1, 2}),
    max_logprobs=20,
    tasks=frozenset({"generate"}),
    has_tokenizer=True,
    has_chat_template=True,
    has_prefix_caching=True,
    has_chunked_prefill=True,
    is_encoder_decoder=False,
    data_parallel_size=1,
    is_unified_memory=False,
    fingerprint="fake-fingerprint",
    has_lora=True,
    largest_image=(64, 48),
)
"""Small enough for a suite to run in a second, with prompts longer than a step."""


class FakeMaintenance:
    """Records each operation."""

    def __init__(self) -> None:
        self.done: list[str] = []

    async def start_profile(self, prefix: str | None) -> None:
        self.done.append(f"profile {prefix}")

    async def stop_profile(self) -> None:
        self.done.append("profile stopped")

    async def reset_caches(self, kinds: frozenset[CacheKind]) -> None:
        self.done.append(f"caches {sorted(kinds)}")

    async def save_sharded_state(
        self, path: str, *, pattern: str | None, max_size_bytes: int | None
    ) -> None:
        self.done.append(f"saved {path} {pattern} {max_size_bytes}")


class StubEngine:
    """An idle `Engine` with nothing wrong, for fakes that replace what their tests need."""

    is_paused = False
    context_limit_tokens: int | None = None
    is_given_up = False

    def declare_dead(self) -> None:
        self.is_given_up = True

    def limit_context(self, tokens: int | None) -> None:
        self.context_limit_tokens = tokens

    @asynccontextmanager
    async def scheduling_paused(self) -> AsyncIterator[None]:
        yield

    async def queued_requests(self) -> int:
        return 0

    async def reset_prefix_cache(self) -> None:
        pass

    @property
    def maintenance(self) -> FakeMaintenance:
        return FakeMaintenance()

    async def sleep(self, level: SleepLevel) -> None:
        del level

    async def wake(self, tags: frozenset[SleepTag]) -> frozenset[SleepTag]:
        return SLEEP_TAGS - tags

    def running_requests(self) -> dict[int, int]:
        return {}

    def blocked_since_seconds(self) -> dict[int, float]:
        return {}

    def deferring(self) -> frozenset[int]:
        return frozenset()

    def is_compiling(self) -> bool:
        return False

    async def canary(self, prompt: Sequence[int] = ()) -> CanaryAnswer:
        del prompt
        return CanaryAnswer()

    async def dump_stacks(self) -> str:
        return ""

    def process_ids(self) -> tuple[int, ...]:
        return ()

    def process_tracebacks(self) -> str:
        return ""

    def host_memory_bytes(self) -> int | None:
        return None

    def suspects(self) -> tuple[Suspect, ...] | None:
        return None


class FakeClock:
    """Time that passes only when the fake engine works."""

    def __init__(self) -> None:
        self.now_seconds = 1000.0

    def __call__(self) -> float:
        return self.now_seconds
