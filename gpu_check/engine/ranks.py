"""Two devices: do both ranks grow alike, and are the tokens the same?"""

from __future__ import annotations

from collections.abc import Sequence

from gpu_check.engine import growth, order
from gpu_check.engine.subjects import Engine
from gpu_check.records import CheckFailedError, Measured


def check(engine: Engine) -> Sequence[Measured]:
    """Seal, retire and lock on each rank, then one growth on both, and the same tokens after it."""
    measured = [*order.sealed(engine), *growth.same_tokens(engine)]
    held = [
        [slot["size_bytes"] for slot in rank["slots"]]
        for rank in engine.server.status()["workspace"]
    ]
    if len(held) != 2 or held[0] != held[1]:
        raise CheckFailedError(f"the workspaces of the ranks are {held}")
    return [*measured, Measured("workspace of each rank", sum(held[0]), "bytes")]
