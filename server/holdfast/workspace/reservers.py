"""Who knows what a model will need? The registry of reservers, and a function for models.

A package declares the need of its models with an entry point of the group `holdfast.reservers`: a
function from `ReserverContext` to terms. A model may instead call `reserve_workspace` while it is
built or warmed up. A term holds for every slot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from vllm.v1.worker import workspace as vllm_workspace

from holdfast.errors import HoldfastError
from holdfast.workspace.callers import first_frame
from holdfast.workspace.manager import Spec, WorkspaceManager, spec_bytes
from holdfast.workspace.plan import Term

GROUP = "holdfast.reservers"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReserverContext:
    """What a reserver may look at."""

    vllm_config: Any
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    hf_config: Any


Reserver = Callable[[ReserverContext], Iterable[Term]]


def declared_terms(context: ReserverContext) -> tuple[Term, ...]:
    """What every reserver declares, by name, and what models asked for so far.

    A reserver that fails or answers nonsense is logged by its name and left out as a whole: the
    model may not need it, and what it would have declared is learned when it does.
    """
    found = sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value))
    terms = [term for point in found for term in _terms(point, context)]
    return (*terms, *_asked_by_models())


def reserve_workspace(*shapes_and_dtypes: Spec) -> None:
    """Make every slot large enough for `shapes_and_dtypes` at once, before the lock.

    Under vLLM's own manager it requests them once, which is how vLLM's own layers reserve.

    Raises:
        HoldfastError: The workspaces are locked and too small, or there are none yet.
    """
    if not vllm_workspace.is_workspace_manager_initialized():
        raise HoldfastError(
            f"{_caller()} reserves workspace where there is none.",
            remedy="reserve in a worker, in the constructor or the warm-up of the model.",
        )
    manager = vllm_workspace.current_workspace_manager()
    if isinstance(manager, WorkspaceManager):
        manager.declare(Term("declared", _caller(), spec_bytes(shapes_and_dtypes)))
    else:
        manager.get_simultaneous(*shapes_and_dtypes)


def _terms(point: EntryPoint, context: ReserverContext) -> tuple[Term, ...]:
    try:
        reserver = cast("Reserver", point.load())
        return tuple(_checked(term) for term in reserver(context))
    except Exception:
        # The edge to foreign code: it may raise anything, and must not keep a model from starting.
        logger.warning("Reserver %s (%s) is left out", point.name, point.value, exc_info=True)
        return ()


def _checked(term: object) -> Term:
    if not isinstance(term, Term):
        raise TypeError(f"a reserver yields terms, not {term!r}")
    if term.source != "declared":
        raise ValueError(f"a reserver declares, its source is not {term.source!r}")
    if type(term.needed_bytes) is not int or term.needed_bytes < 0:
        raise ValueError(f"bytes are a whole number from 0, not {term.needed_bytes!r}")
    if type(term.asked_by) is not str or not term.asked_by:
        raise ValueError("a term names who asks")
    return term


def _asked_by_models() -> tuple[Term, ...]:
    if not vllm_workspace.is_workspace_manager_initialized():
        return ()
    manager = vllm_workspace.current_workspace_manager()
    return tuple(manager.declared.values()) if isinstance(manager, WorkspaceManager) else ()


def _caller() -> str:
    return first_frame(lambda frame: frame.f_globals.get("__name__") != __name__)
