"""Every check: what it is called, what it looks at, what it proves, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SubjectName = Literal["manager", "growing", "declared", "stock", "ranks"]
Need = Literal["torch", "cuda", "two_devices", "workspace_file", "engine"]


@dataclass(frozen=True, slots=True)
class Check:
    """One check; `function` names it as `module:function` below this package."""

    name: str
    subject: SubjectName
    function: str
    proves: str
    needs: tuple[Need, ...] = ()
    """Beside those of its subject."""
    deadline_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class Subject:
    """What checks look at; `opened` names the context manager that makes it."""

    name: SubjectName
    opened: str
    needs: tuple[Need, ...]
    opening_seconds: float


SUBJECTS = (
    Subject("manager", "core.bench:opened", ("torch", "workspace_file"), 60.0),
    Subject("growing", "engine.subjects:growing", ("torch", "engine"), 240.0),
    Subject("declared", "engine.subjects:declared", ("torch", "engine"), 240.0),
    Subject("stock", "engine.subjects:stock", ("torch", "engine"), 240.0),
    Subject("ranks", "engine.subjects:ranks", ("torch", "engine", "two_devices"), 240.0),
)
"""In the order in which they are made."""

CHECKS = (
    Check(
        "refusal_words",
        "manager",
        "core.refusals:check",
        "Under `deny`, a locked manager refuses what vLLM's manager refuses, in vLLM's words.",
    ),
    Check(
        "resident_reservation",
        "manager",
        "core.residence:check",
        "A reservation takes exactly its bytes from the device, at once.",
        needs=("cuda",),
    ),
    Check(
        "growth_under_graphs",
        "manager",
        "core.graphs:growth",
        "After its workspace grew, a captured graph computes the same, and only in its own memory.",
        needs=("cuda",),
    ),
    Check(
        "no_growth_in_capture",
        "manager",
        "core.graphs:no_growth_in_capture",
        "While a stream is captured, growth is refused, and the capture continues.",
        needs=("cuda",),
    ),
    Check(
        "random_lives",
        "manager",
        "core.lives:check",
        "After the seal, every buffer stays alive and unchanged, whatever happens in any order.",
        deadline_seconds=60.0,
    ),
    Check(
        "out_of_memory",
        "manager",
        "core.exhaustion:check",
        "Growth that the device cannot hold is refused, and the old buffer stays in use.",
    ),
    Check(
        "call_times",
        "manager",
        "core.call_times:check",
        "What a layer's workspace request costs, compared with vLLM's own manager.",
    ),
    Check(
        "nan_count",
        "manager",
        "core.nan_rows:check",
        "Looking for NaNs in the logits takes less than 1 % of a decode step.",
        needs=("cuda",),
    ),
    Check(
        "reserve_then_lock",
        "growing",
        "engine.order:locked",
        "The real worker reserves before the KV cache is sized, and locks after warm-up.",
    ),
    Check(
        "seal_retire_lock",
        "growing",
        "engine.order:sealed",
        "The real worker seals before it captures graphs, retires buffers meanwhile, then locks.",
        needs=("cuda",),
    ),
    Check(
        "reservation_in_kv_budget",
        "growing",
        "engine.budget:check",
        "The KV cache shrinks by exactly what is reserved, to the byte.",
    ),
    Check(
        "growth_same_tokens",
        "growing",
        "engine.growth:same_tokens",
        "An engine gives the same answer before, during and after growth past the lock.",
        deadline_seconds=120.0,
    ),
    Check(
        "long_prompt_answered",
        "growing",
        "engine.growth:long_prompt",
        "The same engine answers the prompt that ends stock vLLM, and refuses nothing.",
        deadline_seconds=60.0,
    ),
    Check(
        "step_times",
        "growing",
        "engine.steps:check",
        "What a step costs, as a client sees it; every step is counted.",
        deadline_seconds=60.0,
    ),
    Check(
        "recovery",
        "growing",
        "engine.recovery:check",
        "A killed engine leaves no process, and its successor gives the same answers.",
        deadline_seconds=200.0,
    ),
    Check(
        "memory_returned",
        "growing",
        "engine.recovery:memory_returned",
        "The memory of a killed engine and of a stopped server is free again.",
        needs=("cuda",),
        deadline_seconds=120.0,
    ),
    Check(
        "worst_case_proven",
        "declared",
        "engine.proof:check",
        "With a declared need, the whole probe passes, nothing grows, and the tokens are the same.",
        deadline_seconds=60.0,
    ),
    Check(
        "stock_engine_dies",
        "stock",
        "engine.stock:check",
        "The failure is real: the first long prompt ends the engine of stock vLLM.",
        deadline_seconds=150.0,
    ),
    Check(
        "two_ranks",
        "ranks",
        "engine.ranks:check",
        "On two devices, both ranks seal, lock and grow alike, and the tokens stay the same.",
        deadline_seconds=120.0,
    ),
)
