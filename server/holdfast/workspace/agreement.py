"""What all ranks of a world agree on while an engine starts, each time within a deadline.

A rank that another vLLM started takes no part, and one that hangs comes never: whoever waits for it
says so and ends, and with it the start. gloo's own time-out is half an hour (torch 2.13), and a
rank that reduces something else meanwhile leaves random numbers, which a signature tells apart.
"""

from __future__ import annotations

from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
from torch.distributed import AllreduceOptions, ReduceOp
from vllm.distributed.parallel_state import get_world_group

from holdfast.errors import EngineStartError

AGREEMENT_SECONDS = 600.0
"""For the slowest rank to come, unless vLLM's `--cpu-distributed-timeout-seconds` says another: one
may compile what another has in its cache."""
_SIGNATURE = 0x484F_4C44_4641_5354


class Subject(IntEnum):
    """What is agreed on."""

    RESERVATION = 1
    GROWTH_LIMIT = 2
    CONTEXT_LENGTH = 3


def largest(values: list[int], subject: Subject, parallel_config: Any) -> list[int]:
    """The largest of each of `values` over all ranks; of one rank alone they are what they are.

    Raises:
        EngineStartError: a rank did not come in time, ended, or was about something else.
    """
    return _reduced(values, ReduceOp.MAX, subject, parallel_config)


def smallest(values: list[int], subject: Subject, parallel_config: Any) -> list[int]:
    """The smallest of each of `values` over all ranks, and else as `largest`."""
    return _reduced(values, ReduceOp.MIN, subject, parallel_config)


def _reduced(
    values: list[int], operation: Any, subject: Subject, parallel_config: Any
) -> list[int]:
    group = get_world_group()
    if group.world_size == 1:
        return values
    signature = _SIGNATURE + subject
    # Negated too: the largest and the smallest of both are the same only if all are.
    signed = [signature, -signature]
    tensor = torch.tensor(signed + values, dtype=torch.int64)
    options = AllreduceOptions()
    options.reduceOp = operation
    # Of the operation, not of the wait: what still runs would hold up the end of the process.
    given: timedelta | None = parallel_config.cpu_distributed_timeout
    options.timeout = given or timedelta(seconds=AGREEMENT_SECONDS)
    try:
        group.cpu_group.allreduce([tensor], options).wait()
    except RuntimeError as error:
        raise _disagreement(group, subject, str(error)) from error
    found = [int(value) for value in tensor.tolist()]
    if found[:2] != signed:
        raise _disagreement(group, subject, "another rank was agreeing on something else")
    return found[2:]


def _disagreement(group: Any, subject: Subject, reason: str) -> EngineStartError:
    what = subject.name.lower().replace("_", " ")
    return EngineStartError(
        f"rank {group.rank_in_group} could not agree with the other ranks on the {what}: {reason}",
        remedy="see the logs of the other ranks above, and install the same version of holdfast "
        "for each; --cpu-distributed-timeout-seconds gives them more time.",
    )
