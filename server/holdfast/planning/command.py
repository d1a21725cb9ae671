"""`holdfast plan`: plans reservations from a model's files and the flags, without an engine.

Nothing is guessed: what files and flags do not determine is reported as "measured at first start".
Nothing is downloaded: the model is a local directory, or is in the Hugging Face cache.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from rich.console import Console
from vllm import platforms
from vllm.distributed.utils import get_pp_indices
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms.cpu import CpuPlatform

from holdfast.engine.launch import arguments as vllm_arguments
from holdfast.engine.vllm_errors import model_errors, usage_errors
from holdfast.errors import ExitCode, UsageError
from holdfast.patches import check
from holdfast.planning import PlanFlags
from holdfast.planning.config import DEVICES, PlannedConfig, planned_config
from holdfast.planning.kv_cost import KvCost, kv_cost
from holdfast.planning.report import PlanReport, RankPlan, SlotPlan, TermCost
from holdfast.settings import Settings
from holdfast.terminal import is_terminal
from holdfast.workspace.plan import Reservation, Slot, Term, reserve, terms_of
from holdfast.workspace.reservers import (
    Device,
    ReserverContext,
    Survey,
    Undetermined,
    device_of_platform,
    survey,
)

_LEARNED_NOTE = (
    "The plan leaves out what earlier runs learned, which depends on the configuration that an "
    "engine resolves."
)
_FITTED_NOTE = (
    "--max-model-len auto: the plan is for the longest context that the model supports; at the "
    "start, the reservation is for the longest that fits."
)
_DRAFT_NAMES = ("eagle-", "eagle3", "dflash", "dspark")
"""By these vLLM recognises a draft, the first one found in its name deciding (0.32, 0.33)."""
_NAMED_METHODS = {"eagle", "eagle3", "dflash", "dspark"}
"""Methods that vLLM takes as given; with others that have a draft model it looks at the draft."""
_FITTED = -1
"""The value into which vLLM's parser turns `--max-model-len auto`."""


def print_plan(settings: Settings, flags: PlanFlags) -> ExitCode:
    """Print the plan on standard output, as a table or as JSON.

    Raises:
        UsageError, EngineStartError: as `plan` does.
    """
    report = plan(settings, flags.device)
    if flags.is_json:
        print(report.to_json())  # noqa: T201 - what was asked for
    elif is_terminal(sys.stdout):
        report.print_table(Console())
    else:
        print("\n".join(report.lines()))  # noqa: T201 - what was asked for
    return ExitCode.STOPPED


def plan(settings: Settings, device_name: str | None) -> PlanReport:
    """Plan every slot of every rank, and name what only the first start can measure.

    Raises:
        UsageError: a flag is wrong, or the model cannot be read.
        EngineStartError: the installed vLLM lacks something that the plan has to patch.
    """
    check("plan")
    device = DEVICES[device_name] if device_name is not None else device_of_platform()
    with _parsing_anywhere():
        namespace = vllm_arguments.parse(settings)
        namespace.model = _directory(namespace.model, namespace.revision)
        if namespace.hf_config_path is not None:
            namespace.hf_config_path = _directory(namespace.hf_config_path, namespace.revision)
        arguments = vllm_arguments.engine_arguments(namespace)
        with usage_errors():
            with model_errors(namespace.model):
                config = planned_config(arguments, device, is_named=device_name is not None)
            return _report(settings, arguments, config, device, _cost(config, arguments))


@contextmanager
def _parsing_anywhere() -> Iterator[None]:
    """Let vLLM build its parser on a machine without a device, by presenting the CPU as one."""
    found = platforms.current_platform
    if found.device_type:
        yield
        return
    platforms._current_platform = CpuPlatform()  # noqa: SLF001 - vLLM offers no other way
    try:
        yield
    finally:
        platforms._current_platform = found  # noqa: SLF001 - as above


def _cost(config: PlannedConfig, arguments: AsyncEngineArgs) -> KvCost:
    packing = config.cache_config.cache_dtype
    return kv_cost(config.model_config, config.parallel_config, packing, str(arguments.dtype))


def _directory(name: str, revision: str | None) -> str:
    found = _downloaded(name, revision)
    if found is None:
        raise UsageError(
            f"{name} is neither a local directory nor in the Hugging Face cache.",
            remedy="download its config.json first, for example with `hf download`.",
        )
    return str(found)


def _downloaded(name: str, revision: str | None) -> Path | None:
    """Return the directory with a model's files; None if they are not on this machine."""
    model = Path(name)
    if model.is_dir():
        return model
    try:
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:  # huggingface_hub's HFValidationError: not the name of a repository
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _survey(config: PlannedConfig, device: Device | None) -> Survey:
    scheduler, model = config.scheduler_config, config.model_config
    if scheduler.max_num_batched_tokens is None or scheduler.max_num_seqs is None:
        reason = "the size of a step depends on the device, which --device names, or on the code "
        flags = "of the model: give --max-num-batched-tokens and --max-num-seqs"
        return Survey((), (Undetermined("every reserver", reason + flags),))
    return survey(
        ReserverContext(
            vllm_config=config,
            max_model_len=model.max_model_len,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_num_seqs=scheduler.max_num_seqs,
            hf_config=model.hf_config,
            device=device,
        )
    )


def _report(
    settings: Settings,
    arguments: AsyncEngineArgs,
    config: PlannedConfig,
    device: Device | None,
    cost: KvCost,
) -> PlanReport:
    answers = _survey(config, device)
    floor_bytes = settings.workspace.reserve_bytes
    floor = (Term("floor", "--workspace-reserve", floor_bytes),) if floor_bytes else ()
    reservations = [
        reserve(slot, (*floor, *terms_of(slot, answers.terms)), settings.workspace.headroom)
        for slot in _slots(arguments, device)
    ]
    architectures = tuple(config.model_config.hf_config.architectures or ())
    return PlanReport(
        model=arguments.model,
        architectures=architectures,
        device=device.name if device else None,
        max_model_len=config.model_config.max_model_len,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        headroom=settings.workspace.headroom,
        data_parallel_size=arguments.data_parallel_size,
        kv_cache=cost.meaning,
        ranks=tuple(
            _rank_plan(rank, layers, reservations, cost)
            for rank, layers in _ranks(arguments, config)
        ),
        measured_at_first_start=answers.undetermined,
        notes=(*_fitted_note(arguments), *_notes(answers, architectures)),
    )


def _slots(arguments: AsyncEngineArgs, device: Device | None) -> tuple[Slot, ...]:
    """Return vLLM's slots: two ubatches for dual-batch overlap, two lanes for DSpark drafts."""
    if device is not None and not device.is_cuda:
        return ((0, 0),)
    lanes = 2 if _is_dspark(arguments) else 1
    ubatches = 2 if arguments.enable_dbo else 1
    return tuple((ubatch, lane) for ubatch in range(ubatches) for lane in range(lanes))


def _is_dspark(arguments: AsyncEngineArgs) -> bool:
    """Return whether the drafts are DSpark's, by the flags, the draft's name or its files."""
    speculation = arguments.speculative_config or {}
    method = arguments.spec_method or speculation.get("method")
    draft = str(arguments.spec_model or speculation.get("model") or "")
    if method in _NAMED_METHODS or not draft:
        return bool(method == "dspark")
    kind = next((name for name in _DRAFT_NAMES if name in draft.lower()), None)
    return kind == "dspark" or (kind is None and _has_dspark_layers(draft))


def _has_dspark_layers(draft: str) -> bool:
    directory = _downloaded(draft, None)
    try:
        content = json.loads((directory / "config.json").read_bytes()) if directory else {}
    except (OSError, ValueError):
        return False
    return any("DSpark" in name for name in content.get("architectures") or ())


def _ranks(arguments: AsyncEngineArgs, config: PlannedConfig) -> list[tuple[int, int]]:
    """Return every rank of one engine, with its number of layers."""
    stages = arguments.pipeline_parallel_size
    width = arguments.tensor_parallel_size * arguments.prefill_context_parallel_size
    total = config.model_config.architecture.total_num_hidden_layers
    bounds = [get_pp_indices(total, stage, stages) for stage in range(stages)]
    return [
        (stage * width + position, last - first)
        for stage, (first, last) in enumerate(bounds)
        for position in range(width)
    ]


def _rank_plan(rank: int, layers: int, reservations: list[Reservation], cost: KvCost) -> RankPlan:
    return RankPlan(
        rank=rank,
        layers=layers,
        kv_bytes_per_token=cost.bytes_per_token(layers),
        slots=tuple(_slot_plan(reservation, layers, cost) for reservation in reservations),
    )


def _slot_plan(reservation: Reservation, layers: int, cost: KvCost) -> SlotPlan:
    ubatch, lane = reservation.slot
    return SlotPlan(
        ubatch=ubatch,
        lane=lane,
        size_bytes=reservation.size_bytes,
        kv_tokens=cost.tokens(reservation.size_bytes, layers),
        terms=tuple(
            TermCost(
                term.source,
                term.asked_by,
                term.needed_bytes,
                cost.tokens(term.needed_bytes, layers),
            )
            for term in reservation.terms
        ),
    )


def _fitted_note(arguments: AsyncEngineArgs) -> tuple[str, ...]:
    return (_FITTED_NOTE,) if arguments.max_model_len == _FITTED else ()


def _notes(answers: Survey, architectures: tuple[str, ...]) -> tuple[str, ...]:
    if answers.terms or answers.undetermined:
        return (_LEARNED_NOTE,)
    name = ", ".join(architectures) or "this model"
    no_reserver = (
        f"Holdfast has no reserver for {name}: the probe at the first start finds what it needs, "
        "and the next start reserves that."
    )
    return no_reserver, _LEARNED_NOTE
