"""What will a model need? The registry of reservers, and those that Holdfast brings.

A package declares the needs of its models with an entry point of the group `holdfast.reservers`: a
function from `ReserverContext` to terms. A model may instead call `reserve_workspace` while it is
built or warmed up. A term applies to every ubatch of the lanes that it names.

    deepseek    the prefill of DeepSeek-V4 and V4.1
    lamport     the all-reduce of MiniMax models, outside the slots
    moe         fused experts
    turboquant  the caches of TurboQuant and UltraQuant
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from vllm.platforms import current_platform
from vllm.v1.worker import workspace as vllm_workspace

from holdfast.errors import HoldfastError
from holdfast.workspace.buffers import TensorSpec, nearest_caller, spec_bytes
from holdfast.workspace.manager import WorkspaceManager
from holdfast.workspace.plan import TARGET_LANE, Term

GROUP = "holdfast.reservers"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Device:
    """What decides which kernels vLLM chooses."""

    name: str
    is_cuda: bool
    capability_major: int = 0


@dataclass(frozen=True, slots=True)
class ReserverContext:
    """What a reserver may read.

    A worker fills in everything, and `model` is the loaded module. `holdfast plan` has no engine:
    there, `vllm_config` has only the most common attributes, `model` is None, and `device` is the
    one that the user named, or None if it is unknown.
    """

    vllm_config: Any
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    hf_config: Any
    model: Any = None
    device: Device | None = None
    draft_model: Any = None
    """The loaded draft model, if there is one."""
    draft_lane: int = TARGET_LANE
    """The lane of the draft model."""


@dataclass(frozen=True, slots=True)
class Undetermined:
    """A need that the context does not determine. Workers ignore it, `holdfast plan` shows it."""

    asked_by: str
    reason: str


Reserver = Callable[[ReserverContext], Iterable[Term | Undetermined]]


@dataclass(frozen=True, slots=True)
class Survey:
    """What all reservers returned, ordered by the names of their entry points."""

    terms: tuple[Term, ...]
    undetermined: tuple[Undetermined, ...]


def device_of_platform() -> Device | None:
    """Return the device of vLLM's platform; None if vLLM found none on this machine."""
    if current_platform.is_cpu():
        return Device("cpu", is_cuda=False)
    if not current_platform.is_cuda():
        return None
    capability = current_platform.get_device_capability()
    if capability is None:
        return None
    return Device(str(current_platform.get_device_name()), True, int(capability.major))


def declared_terms(context: ReserverContext, *, is_logged: bool = True) -> tuple[Term, ...]:
    """Return what every reserver declares, and what models have requested so far.

    A reserver that fails or returns nonsense is logged by name and left out as a whole: the model
    may not need it, and if it does, Holdfast learns the need. A caller that tries many lengths
    turns `is_logged` off, which lowers the level to debug.
    """
    return (*survey(context, is_logged=is_logged).terms, *_declared_by_models())


def survey(context: ReserverContext, *, is_logged: bool = True) -> Survey:
    """Return what every reserver returns; one that fails is logged and counts as undetermined."""
    found = sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value))
    answers = [
        answer for point in found for answer in _answers(point, context, is_logged=is_logged)
    ]
    return Survey(
        tuple(answer for answer in answers if isinstance(answer, Term)),
        tuple(answer for answer in answers if isinstance(answer, Undetermined)),
    )


def reserve_workspace(*shapes_and_dtypes: TensorSpec, lanes: tuple[int, ...] | None = None) -> None:
    """Make every slot, or those of `lanes`, large enough for `shapes_and_dtypes`, before the lock.

    The default is every lane, because the metadata builder of a draft is made outside its lane.
    With vLLM's own manager it requests them once, as vLLM's own layers do to reserve.

    Raises:
        HoldfastError: the workspaces are locked and too small, or do not exist yet.
    """
    if not vllm_workspace.is_workspace_manager_initialized():
        raise HoldfastError(
            f"{_caller()} reserves workspace outside a worker.",
            remedy="reserve it in a worker, in the constructor or the warm-up of the model.",
        )
    manager = vllm_workspace.current_workspace_manager()
    if isinstance(manager, WorkspaceManager):
        if lanes is None:
            lanes = tuple(sorted({lane for _, lane in manager.slots}))
        manager.declare(Term("declared", _caller(), spec_bytes(shapes_and_dtypes), lanes))
    else:
        manager.get_simultaneous(*shapes_and_dtypes)


def _answers(
    point: EntryPoint, context: ReserverContext, *, is_logged: bool
) -> tuple[Term | Undetermined, ...]:
    try:
        reserver = cast("Reserver", point.load())
        return tuple(_checked(answer) for answer in reserver(context))
    except Exception as error:
        # Foreign code may raise anything, and must not keep a model from starting.
        level = logging.WARNING if is_logged else logging.DEBUG
        logger.log(level, "Reserver %s (%s) is left out", point.name, point.value, exc_info=True)
        return (Undetermined(f"reserver {point.name}", f"it failed with {type(error).__name__}"),)


def _checked(answer: object) -> Term | Undetermined:
    if isinstance(answer, Undetermined):
        return answer
    if not isinstance(answer, Term):
        raise TypeError(f"a reserver must yield terms, not {answer!r}")
    if answer.source != "declared":
        raise ValueError(f"the source of a term must be 'declared', not {answer.source!r}")
    if type(answer.needed_bytes) is not int or answer.needed_bytes < 0:
        raise ValueError(
            f"the bytes of a term must be a whole number of 0 or more, not {answer.needed_bytes!r}"
        )
    if type(answer.asked_by) is not str or not answer.asked_by:
        raise ValueError("a term must name what asks for it")
    if not answer.lanes or any(type(lane) is not int or lane < 0 for lane in answer.lanes):
        raise ValueError(
            f"the lanes of a term must be whole numbers of 0 or more, not {answer.lanes!r}"
        )
    return answer


def _declared_by_models() -> tuple[Term, ...]:
    if not vllm_workspace.is_workspace_manager_initialized():
        return ()
    manager = vllm_workspace.current_workspace_manager()
    return tuple(manager.declared.values()) if isinstance(manager, WorkspaceManager) else ()


def _caller() -> str:
    return nearest_caller(lambda frame: frame.f_globals.get("__name__") != __name__)
