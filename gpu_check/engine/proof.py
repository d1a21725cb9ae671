"""Does a start with a declared need prove its worst case, and say what an engine that grew says?"""

from __future__ import annotations

import json
from collections.abc import Sequence

from gpu_check.engine.growth import answers, locked_growths, refused
from gpu_check.engine.subjects import MAX_MODEL_LEN, Engine
from gpu_check.records import CheckFailedError, Measured


def check(engine: Engine) -> Sequence[Measured]:
    """The whole suite, nothing grown and nothing refused; the tokens of the subject `growing`."""
    probe = engine.server.status()["probe"]
    if not probe["passed"] or probe["limited"] or probe["proven_tokens"] != MAX_MODEL_LEN - 1:
        raise CheckFailedError(f"the probe says {probe}")
    said = answers(engine)
    grown, count = locked_growths(engine), refused(engine)
    if any(grown) or count:
        raise CheckFailedError(f"growths of each rank after the lock: {grown}; refusals: {count}")
    compared = 0
    if engine.tokens_path.exists():
        other = json.loads(engine.tokens_path.read_text())
        compared = len(said)
        if said != other:
            raise CheckFailedError(f"with what was declared {said}, with growth {other}")
    steps = [
        Measured(f"probe step {step['name']}", round(step["duration_seconds"], 2), "s")
        for step in probe["steps"]
    ]
    return [
        Measured("proven", probe["proven_tokens"], "tokens"),
        Measured("start until ready", round(engine.start_seconds, 1), "s"),
        Measured("answers that an engine with growth gave too", compared),
        *steps,
    ]
