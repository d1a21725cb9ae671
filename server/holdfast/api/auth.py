"""Who has a key?"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from holdfast.api.replies import openai_error


class ApiKeys:
    """The keys that open a route; without any key it is open to all."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    def admits(self, headers: Headers) -> bool:
        """Whether the request carries one of the keys. Takes the same time for any wrong one."""
        if not self._digests:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        found = _digest(given)
        matches = [hmac.compare_digest(found, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def unauthorized() -> JSONResponse:
    """The answer to a request without a right key."""
    return openai_error(
        "This route needs an API key: send it as 'Authorization: Bearer KEY'.",
        kind="authentication_error",
        status=401,
        headers={"www-authenticate": "Bearer"},
    )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
