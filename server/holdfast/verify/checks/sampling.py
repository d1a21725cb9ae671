"""Sampled answers, for the groups that ask for them: with a seed, where the server takes one."""

from __future__ import annotations

from typing import Any

from holdfast.verify.checks.asking import each
from holdfast.verify.trial import UNKNOWN_FIELD, Trial, UnexpectedStatusError

_SEED = 1


async def refused_seeds(trial: Trial) -> dict[str, str]:
    """What the server says to a `seed`, by the path of each API that refuses one; vLLM takes them.

    Raises:
        UnexpectedStatusError: it fails, or refuses the same request without a seed too.
    """
    refused = dict[str, str]()
    asked = each(trial, "Hi", max_tokens=1, temperature=1.0)
    for path, body in asked if not trial.server.is_vllm else ():
        try:
            await trial.post(path, {**body, "seed": _SEED})
        except UnexpectedStatusError as error:
            if error.status not in UNKNOWN_FIELD:
                raise
            await trial.post(path, body)
            refused[path] = str(error)
    return refused


async def takes_seeds(trial: Trial) -> bool:
    """Whether each sampled answer may have a seed, see `refused_seeds`."""
    return not await trial.once(refused_seeds)


def sampling(temperature: float, seed: int, *, is_seeded: bool) -> dict[str, Any]:
    """The options of a sampled answer, which is the same again where it has a seed."""
    return {"temperature": temperature, **({"seed": seed} if is_seeded else {})}
