"""The switches of the demo model, as they stand in its config.json under `holdfast_demo`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NoReturn, Self, get_args

from holdfast.demo.steps import StepQuantity, StepShape, quantity
from holdfast.errors import HoldfastError, UsageError
from holdfast.workspace.plan import round_up

CONFIG_KEY = "holdfast_demo"
FaultEffect = Literal["scratch", "persistent", "raise", "crash", "hang", "nan", "nan_row", "slow"]
Damage = Literal[
    "scaled_weight", "swapped_rows", "quantized_head", "shifted_positions", "dropped_block"
]
_MAX_SECONDS = 3600
_SIZED_EFFECTS = ("scratch", "persistent")
_WORKSPACE_ALIGNMENT_BYTES = 256
"""vLLM's manager rounds each tensor of a request up to this."""


class InjectedFaultError(HoldfastError):
    """A switch of the demo model asked for this failure."""


@dataclass(frozen=True, slots=True)
class DemoFault:
    """Something that only one kind of step meets, and that the model does not declare.

    Due in every step whose quantity `when` is at least `threshold` and, if given, at most `until`.
    Effects: `scratch` takes `scratch_bytes` from the workspace, `persistent` the same as a
    persistent resource, `raise` fails, `crash` ends the process by SIGSEGV, `hang` never returns,
    `nan` makes all logits NaN, `nan_row` those of the first request, `slow` takes `seconds` longer.
    """

    when: StepQuantity
    threshold: int
    effect: FaultEffect
    scratch_bytes: int = 0
    rank: int | None = None
    """The rank of the engine's world that is hit; all are if None."""
    until: int | None = None
    seconds: float = 0.0
    armed_by: str = ""
    """A file without which the fault rests, and which it removes when it strikes."""

    def is_due(self, step: StepShape, rank: int) -> bool:
        """Whether `step` on `rank` meets the fault."""
        size = quantity(step, self.when)
        is_within = self.threshold <= size and (self.until is None or size <= self.until)
        return is_within and self.rank in {None, rank}

    @classmethod
    def from_record(cls, record: object) -> Self:
        """Parse one entry of `faults`; a `UsageError` says what is wrong with it."""
        fault = cls(**_known_fields(cls, record))
        _demand(fault.when in get_args(StepQuantity), "when", fault.when)
        _demand(fault.effect in get_args(FaultEffect), "effect", fault.effect)
        _demand(_is_count(fault.threshold, least=1), "threshold", fault.threshold)
        _demand(fault.until is None or _is_count(fault.until), "until", fault.until)
        _demand(fault.rank is None or _is_count(fault.rank), "rank", fault.rank)
        least_bytes = int(fault.effect in _SIZED_EFFECTS)
        _demand(_is_count(fault.scratch_bytes, least_bytes), "scratch_bytes", fault.scratch_bytes)
        _demand(_is_time(fault.seconds), "seconds", fault.seconds)
        _demand(isinstance(fault.armed_by, str), "armed_by", fault.armed_by)
        return fault


@dataclass(frozen=True, slots=True)
class DemoSwitches:
    """What the demo model needs, whether it says so, and what its author overlooked."""

    declares_need: bool = True
    """Whether the reserver declares what every prefill takes. Faults are never declared."""
    scratch_bytes_per_token: int = 1024
    stages_decodes: bool = False
    """Whether decodes pass their queries through scratch too, with a row for each request. On a GPU
    their graphs then hold its address."""
    faults: tuple[DemoFault, ...] = ()
    damage: Damage | None = None
    """What is wrong with its arithmetic in every step: one matrix of weights is scaled by 1.01, two
    rows of the output head are swapped, the head is rounded to 8 bits, positions from
    `damage_start` on are off by one, or a chunk of a prefill that fills an engine step and
    continues a context loses its last block."""
    damage_start: int = 4096

    def to_record(self) -> dict[str, Any]:
        """The JSON object that `from_record` reads."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: object) -> Self:
        """Parse the object under `CONFIG_KEY`; a `UsageError` says what is wrong with it."""
        values = _known_fields(cls, record)
        faults = values.pop("faults", ())
        _demand(isinstance(faults, list | tuple), "faults", faults)
        switches = cls(**values, faults=tuple(DemoFault.from_record(fault) for fault in faults))
        _demand(isinstance(switches.declares_need, bool), "declares_need", switches.declares_need)
        _demand(
            isinstance(switches.stages_decodes, bool), "stages_decodes", switches.stages_decodes
        )
        row_bytes = switches.scratch_bytes_per_token
        is_row = _is_count(row_bytes, least=1) and row_bytes % _WORKSPACE_ALIGNMENT_BYTES == 0
        _demand(is_row, "scratch_bytes_per_token", row_bytes)
        _demand(switches.damage in {None, *get_args(Damage)}, "damage", switches.damage)
        _demand(_is_count(switches.damage_start), "damage_start", switches.damage_start)
        return switches


DEFAULT_SWITCHES = DemoSwitches()


def scratch_rows(longest_context_tokens: int, scheduled_tokens: int) -> int:
    """Rows that a prefill takes: one for each token of the context, and for each new token."""
    return max(longest_context_tokens, scheduled_tokens)


def scratch_need_bytes(rows: int, scratch_bytes_per_token: int) -> int:
    """What vLLM's manager hands out for a request of `rows` rows."""
    return round_up(rows * scratch_bytes_per_token, _WORKSPACE_ALIGNMENT_BYTES)


def _known_fields(record_class: type[Any], record: object) -> dict[str, Any]:
    if not isinstance(record, Mapping):
        _reject(f"{record!r} is not an object")
    known = {field.name for field in fields(record_class)}
    if unknown := sorted(set(record) - known):
        _reject(
            f"unknown switch {', '.join(unknown)}; the known ones are {', '.join(sorted(known))}"
        )
    try:
        record_class(**record)
    except TypeError as error:
        _reject(str(error))
    return dict(record)


def _is_count(number: object, least: int = 0) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= least


def _is_time(number: object) -> bool:
    return isinstance(number, int | float) and 0 <= number < _MAX_SECONDS


def _demand(is_valid: bool, name: str, given: object) -> None:
    if not is_valid:
        _reject(f"{given!r} is not a valid value for {name}")


def _reject(cause: str) -> NoReturn:
    raise UsageError(
        f"config.json, {CONFIG_KEY}: {cause}.",
        remedy="Remove the model's directory, so that it is made again; or correct the switch.",
    )
