"""Asks every installed reserver, and lets a model reserve for itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from vllm.platforms import current_platform
from vllm.v1.worker import workspace as vllm_workspace

from holdfast.errors import HoldfastError
from holdfast.workspace.buffers import Spec, first_frame, spec_bytes
from holdfast.workspace.manager import WorkspaceManager
from holdfast.workspace.plan import TARGET_LANE, Term

GROUP = "holdfast.reservers"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Device:
    """What decides which kernels vLLM picks."""

    name: str
    is_cuda: bool
    capability_major: int = 0


@dataclass(frozen=True, slots=True)
class ReserverContext:
    """What a reserver may look at.

    In a worker all of it is there, and `model` is the loaded module. `holdfast plan` has no engine:
    there `vllm_config` has only the commonest attributes, `model` is None, and `device` is the one
    that was named, or None if nobody knows it.
    """

    vllm_config: Any
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    hf_config: Any
    model: Any = None
    device: Device | None = None
    draft_model: Any = None
    """The loaded module that drafts, if there is one."""
    draft_lane: int = TARGET_LANE
    """Where it asks."""


@dataclass(frozen=True, slots=True)
class Undetermined:
    """A need that the context does not tell; workers ignore it, `holdfast plan` says so."""

    asked_by: str
    reason: str


Reserver = Callable[[ReserverContext], Iterable[Term | Undetermined]]


@dataclass(frozen=True, slots=True)
class Survey:
    """What all reservers answered, by the name of their entry points."""

    terms: tuple[Term, ...]
    undetermined: tuple[Undetermined, ...]


def device_of_platform() -> Device | None:
    """The device that vLLM's platform stands for; None if vLLM found none on this machine."""
    if current_platform.is_cpu():
        return Device("cpu", is_cuda=False)
    if not current_platform.is_cuda():
        return None
    capability = current_platform.get_device_capability()
    if capability is None:
        return None
    return Device(str(current_platform.get_device_name()), True, int(capability.major))


def declared_terms(context: ReserverContext, *, is_told: bool = True) -> tuple[Term, ...]:
    """What every reserver declares, by name, and what models asked for so far.

    A reserver that fails or answers nonsense is logged by its name and left out as a whole: the
    model may not need it, and what it would have declared is learned when it does. Where many
    lengths are tried, `is_told` says whether this is one to log about.
    """
    return (*survey(context, is_told=is_told).terms, *_asked_by_models())


def survey(context: ReserverContext, *, is_told: bool = True) -> Survey:
    """What every reserver answers; one that fails or answers nonsense is logged, undetermined."""
    found = sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value))
    answers = [answer for point in found for answer in _answers(point, context, is_told=is_told)]
    return Survey(
        tuple(answer for answer in answers if isinstance(answer, Term)),
        tuple(answer for answer in answers if isinstance(answer, Undetermined)),
    )


def reserve_workspace(*shapes_and_dtypes: Spec, lanes: tuple[int, ...] | None = None) -> None:
    """Make every slot, or those of `lanes`, large enough for `shapes_and_dtypes`, before the lock.

    The default is every lane, because a metadata builder of a draft is made outside of its lane.
    Under vLLM's own manager it requests them once, which is how vLLM's own layers reserve.

    Raises:
        HoldfastError: The workspaces are locked and too small, or there are none yet.
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
    point: EntryPoint, context: ReserverContext, *, is_told: bool
) -> tuple[Term | Undetermined, ...]:
    try:
        reserver = cast("Reserver", point.load())
        return tuple(_checked(answer) for answer in reserver(context))
    except Exception as error:
        # The edge to foreign code: it may raise anything, and must not keep a model from starting.
        level = logging.WARNING if is_told else logging.DEBUG
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


def _asked_by_models() -> tuple[Term, ...]:
    if not vllm_workspace.is_workspace_manager_initialized():
        return ()
    manager = vllm_workspace.current_workspace_manager()
    return tuple(manager.declared.values()) if isinstance(manager, WorkspaceManager) else ()


def _caller() -> str:
    return first_frame(lambda frame: frame.f_globals.get("__name__") != __name__)
