"""Trains the network: deterministic with its seed, and resumed from the last checkpoint."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.nn import functional

from demo_training.batches import Batch, step_batches
from demo_training.checkpoints import Checkpoint, read_checkpoint, write_checkpoint
from demo_training.course import Course
from demo_training.exam import described, scores
from demo_training.muon import Muon
from demo_training.network import Network
from holdfast.errors import UsageError

_THREADS = 2
_MATRIX_RATE = 6e-3
_OTHER_RATE = 4e-3
_CLIPPED_NORM = 1.0
_STEPS_PER_REPORT = 50
_STEPS_PER_EXAM = 200
_QUESTIONS_ON_THE_WAY = 40

Weights = dict[str, torch.Tensor]


def train(course: Course, directory: Path, *, stop_after: int | None = None) -> Network:
    """The network after all steps, or after the first `stop_after` of them.

    What `directory` holds of them already is not done again.

    Raises:
        UsageError: `directory` has a checkpoint that this course does not lead to.
    """
    torch.manual_seed(course.seed)
    network = Network()
    optimizers = optimizers_of(network)
    done, before = _restore(directory, course, network, optimizers)
    team = Team(network)
    began, tokens, losses = time.monotonic(), 0, 0.0
    last = course.total_steps if stop_after is None else stop_after
    for step in range(done, last):
        if step in course.later_parts:
            share = course.later_share(step)
            before = copy.deepcopy(_handed_on(before, network.state_dict(), share))
            network.load_state_dict(before)
            optimizers = optimizers_of(network)  # so that it goes on from the weights alone
        batches = step_batches(course, step)
        _set_rate(optimizers, course.rate(step))
        losses += team.backward(batches)
        _step_optimizers(network, optimizers)
        tokens += sum(batch.tokens.numel() for batch in batches)
        if (step + 1) % _STEPS_PER_REPORT == 0:
            seconds = time.monotonic() - began
            print(
                f"step {step + 1} of {course.total_steps}: loss {losses / _STEPS_PER_REPORT:.4f}, "
                f"{tokens / seconds:,.0f} tokens/s",
                flush=True,
            )
            began, tokens, losses = time.monotonic(), 0, 0.0
        if step + 1 == last or (step + 1) % _STEPS_PER_REPORT == 0:
            states = [optimizer.state_dict() for optimizer in optimizers]
            checkpoint = Checkpoint(course, step + 1, network.state_dict(), states, before)
            write_checkpoint(directory, checkpoint)
        if (step + 1) % _STEPS_PER_EXAM == 0:
            print(described(scores(network, _QUESTIONS_ON_THE_WAY)), flush=True)
    return network


def final_weights(checkpoint: Checkpoint) -> Weights:
    """The mean of the weights before and after the last part, or those of a course of one part."""
    share = checkpoint.course.later_share(checkpoint.steps_done)
    return _mean(checkpoint.before, checkpoint.network, share)


def _handed_on(before: Weights | None, after: Weights, share: float) -> Weights:
    """What a part goes on from: the lessons' weights, or what a package would have of a later part.

    So long texts can go on from a package.
    """
    if before is None:
        return after
    return {name: weight.half().float() for name, weight in _mean(before, after, share).items()}


def _mean(before: Weights | None, after: Weights, share: float) -> Weights:
    if before is None:
        return after
    return {name: torch.lerp(before[name], weight, share) for name, weight in after.items()}


def optimizers_of(network: Network) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, Adam for embedding, head and norms."""
    inner = [p for p in network.model.layers.parameters() if p.ndim > 1]
    others = [p for p in network.parameters() if all(p is not other for other in inner)]
    return [
        Muon(inner, lr=_MATRIX_RATE, weight_decay=0.02),
        torch.optim.AdamW(others, lr=_OTHER_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _set_rate(optimizers: list[torch.optim.Optimizer], share: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = optimizer.defaults["lr"] * share


class Team:
    """The network and its twins: they share the weights, and each has gradients of its own.

    Each works on its share of a step in a thread of its own. What share that is depends on nothing
    but the step, and the gradients are added in one order, so that a step is deterministic.
    """

    def __init__(self, network: Network) -> None:
        self._members = [network, *(copy.deepcopy(network) for _ in range(_THREADS - 1))]
        for twin in self._members[1:]:
            for own, shared in zip(twin.parameters(), network.parameters(), strict=True):
                own.data = shared.data
        self._pool = ThreadPoolExecutor(_THREADS, initializer=torch.set_num_threads, initargs=(1,))

    def backward(self, batches: Sequence[Batch]) -> float:
        """Leave the gradients of the mean loss in the network; the loss is returned."""
        taught = sum(int((batch.labels >= 0).sum()) for batch in batches)
        shares = [
            self._pool.submit(_backward, member, batches[place::_THREADS], taught)
            for place, member in enumerate(self._members)
        ]
        loss = sum(share.result() for share in shares)
        network, *twins = self._members
        for twin in twins:
            for whole, part in zip(network.parameters(), twin.parameters(), strict=True):
                if part.grad is not None and whole.grad is not None:
                    whole.grad += part.grad
                part.grad = None
        return loss


def _backward(network: Network, batches: Sequence[Batch], taught: int) -> float:
    total = 0.0
    for batch in batches:
        is_taught = batch.labels >= 0
        logits = network(batch.tokens, batch.positions, is_taught)
        loss = functional.cross_entropy(logits, batch.labels[is_taught], reduction="sum")
        loss /= taught
        loss.backward()
        total += loss.item()
    return total


def _step_optimizers(network: Network, optimizers: list[torch.optim.Optimizer]) -> None:
    torch.nn.utils.clip_grad_norm_(network.parameters(), _CLIPPED_NORM)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _restore(
    directory: Path, course: Course, network: Network, optimizers: list[torch.optim.Optimizer]
) -> tuple[int, Weights | None]:
    """The steps that were done before, and the weights with which the present part began."""
    directory.mkdir(parents=True, exist_ok=True)
    checkpoint = read_checkpoint(directory)
    if checkpoint is None:
        return 0, None
    if not course.continues(checkpoint.course, checkpoint.steps_done):
        raise UsageError(
            f"{directory} has a checkpoint of another course: {checkpoint.course}.",
            remedy="Train in another directory, or with the same seed and steps.",
        )
    network.load_state_dict(checkpoint.network)
    for optimizer, state in zip(optimizers, checkpoint.optimizers, strict=True):
        optimizer.load_state_dict(state)
    return checkpoint.steps_done, checkpoint.before
