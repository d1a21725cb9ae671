"""What of the other routes?"""

from __future__ import annotations

from functools import partial
from typing import Any

from holdfast.verify.check import FROM_STANDARD, Check
from holdfast.verify.trial import SkippedError, Trial

_OTHERS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "Hello"},
    "/v1/score": {"text_1": "Hello", "text_2": "Hi"},
    "/v1/rerank": {"query": "Hello", "documents": ["Hi"]},
    "/pooling": {"input": "Hello"},
    "/classify": {"input": "Hello"},
    "/detokenize": {"tokens": [20, 21]},
}
_NOT_IMPLEMENTED = 501


async def other_routes(trial: Trial) -> None:
    """What a model cannot do is refused, and does not look like a failure of the server."""
    listed = [path for path in _OTHERS if path in trial.server.routes]
    if not listed:
        raise SkippedError("the server lists no other routes")
    for path in listed:
        body = {"model": trial.server.model, **_OTHERS[path]}
        answer = await trial.admitted(partial(trial.ask, path, body))
        is_told = answer.status < 500 or answer.status == _NOT_IMPLEMENTED
        trial.require(is_told, f"{path} gets {answer.status}", answer)
    trial.measure("other routes", len(listed))


CHECKS = (
    Check(
        "other_routes",
        "wire",
        other_routes,
        "What the model cannot do gets a 4xx or 501, and never 500.",
        profiles=FROM_STANDARD,
    ),
)
