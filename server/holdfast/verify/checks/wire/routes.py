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
"""What is asked of a route that the model may not be made for."""
_RESPONSE = "/v1/responses/{response_id}"
_EMPTY = (
    "/score",
    "/rerank",
    "/v2/rerank",
    "/v2/embed",
    "/generative_scoring",
    "/inference/v1/generate",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/chat/completions/batch",
    "/v1/chat/completions/derender",
    "/v1/chat/completions/render",
    "/v1/completions/derender",
    "/v1/completions/render",
    "/v1/messages/count_tokens",
    "/v1/messages/render",
    "/v1/responses/render",
    "/v1/systemone",
    f"{_RESPONSE}/cancel",
)
"""Routes that are asked with an empty object, which lacks what each of them needs."""
ROUTES = (*_OTHERS, _RESPONSE, *_EMPTY)
"""All that are asked, where the server lists them."""
_NO_RESPONSE = "resp_none"
_NOT_IMPLEMENTED = 501


async def other_routes(trial: Trial) -> None:
    """What is wrong, or beyond the model, is refused, and not as if the server had failed."""
    listed = [path for path in ROUTES if path in trial.server.routes]
    if not listed:
        raise SkippedError("the server lists no other routes")
    for path in listed:
        asked = path.replace("{response_id}", _NO_RESPONSE)
        answer = await trial.admitted(partial(trial.ask, asked, _body_for(trial, path)))
        is_told = answer.status < 500 or answer.status == _NOT_IMPLEMENTED
        trial.require(is_told, f"{asked} gets {answer.status}", answer)
    trial.measure("routes", len(listed))


def _body_for(trial: Trial, path: str) -> dict[str, Any] | None:
    """The body of the request; None for one that only reads."""
    if path == _RESPONSE:
        return None
    return {"model": trial.server.model, **_OTHERS[path]} if path in _OTHERS else {}


CHECKS = (
    Check(
        "other_routes",
        "wire",
        other_routes,
        "An empty request, or what the model cannot do, gets a 4xx or 501, and never 500.",
        profiles=FROM_STANDARD,
    ),
)
