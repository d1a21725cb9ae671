"""What follows for a request that has ended engines, and for its key. Belongs to one event loop."""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.engine.requests.request import EngineRequest, quarantine_error, suspected_error
from holdfast.engine.suspects.digests import Digests
from holdfast.engine.suspects.suspicions import Suspicions
from holdfast.errors import HoldfastError

logger = logging.getLogger("holdfast.engine")


class Convictions:
    """Refuses requests on behalf of `Blame`, and has their digests and keys remembered."""

    def __init__(
        self,
        suspicions: Suspicions,
        digests: Digests,
        refused: Callable[[EngineRequest], None],
    ) -> None:
        """Take `refused`, which is called with each request that gets a refusal."""
        self._suspicions = suspicions
        self._digests = digests
        self._refused = refused

    def convict(self, request: EngineRequest) -> None:
        """Refuse a request on evidence that is not a proof; a second one quarantines its like.

        Its key is charged one death, however many are explained.
        """
        if self.is_suspected(request):
            self.quarantine(request, deaths=1)
            return
        logger.error("request %s is not retried: an engine died of it", request.request_id)
        self._suspicions.suspect(*self.identity(request))
        self.charge(request, deaths=1)
        self.refuse(request, suspected_error())

    def quarantine(self, request: EngineRequest, *, deaths: int) -> None:
        """Refuse a request that was shown to end engines, and its like."""
        logger.error("request %s is quarantined: engines died of it", request.request_id)
        self._suspicions.quarantine(*self.identity(request))
        self.charge(request, deaths=deaths)
        self.refuse(request, quarantine_error())

    def charge(self, request: EngineRequest, *, deaths: int) -> None:
        """Record that the key of a request, if it has one, has ended this many engines."""
        if request.context.key:
            self._suspicions.charge(request.context.key, deaths)

    def refuse(self, request: EngineRequest, error: HoldfastError) -> None:
        """Answer a request with an error, and give it to no engine any more."""
        request.refusal = error
        self._refused(request)

    def identity(self, request: EngineRequest) -> tuple[str, str]:
        """Return the digest and the key by which a request is known again."""
        return self._digests.of(request), request.context.key

    def is_suspected(self, request: EngineRequest) -> bool:
        """Whether a request like it, of the same key, alone may have ended an engine."""
        return self._suspicions.is_suspected(*self.identity(request))
