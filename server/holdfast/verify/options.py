"""What a user asks of the checks, beside the profile."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.verify.baseline import Baseline
from holdfast.verify.soak_plan import SoakPlan
from holdfast.verify.tasks import Task


@dataclass(frozen=True, slots=True)
class Options:
    """The flags that checks look at."""

    baseline: Baseline | None = None
    """`--against`: what the server is compared with."""
    tasks: tuple[Task, ...] = ()
    """`--tasks`: what the user asks of the model."""
    lm_eval: str = ""
    """`--lm-eval`: tasks of lm-eval by their names, or a directory of them; empty for none."""
    kill_command: tuple[str, ...] = ()
    """`--kill-command`: what kills the engine; empty if nothing may."""
    records: bool = False
    """`--record`: whether a baseline is measured."""
    soak: SoakPlan | None = None
    """`--hours`: how long the soak lasts; None without one."""
    model: str | None = None
    """`--model`: which of the models that the server lists is verified; None for the first."""
