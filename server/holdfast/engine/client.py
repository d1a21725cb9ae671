"""The EngineClient that vLLM's OpenAI layer holds for life, whichever engine is behind it.

The delegation is generated from vLLM's own abstract class, so that a method added in another
version is forwarded too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.v1.engine.exceptions import EngineDeadError

_OWN = {"is_running", "is_stopped", "errored", "dead_error", "shutdown"}


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: EngineProxy, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.current, name)(*args, **kwargs)

    method.__name__ = name
    return method


_Forwarding: Any = type(
    "_Forwarding",
    (EngineClient,),
    {
        name: _forwarded(name)
        for name, member in vars(EngineClient).items()
        if callable(member) and not name.startswith("__") and name not in _OWN
    },
)


class EngineProxy(_Forwarding):  # type: ignore[misc]  # made from vLLM's class above
    """Forwards everything to the engine of the current generation.

    It never says that it errored: vLLM would end the HTTP server, which is the supervisor's to end.
    """

    def __init__(self) -> None:
        self._current: Any | None = None

    @property
    def current(self) -> Any:
        """The AsyncLLM in use.

        Raises:
            EngineDeadError: there is none; vLLM's routes answer 500.
        """
        if self._current is None:
            raise EngineDeadError
        return self._current

    def use(self, engine: Any | None) -> None:
        """Put another engine, or none, behind the proxy."""
        self._current = engine

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.current, name)

    @property
    def is_running(self) -> bool:
        return True

    @property
    def is_stopped(self) -> bool:
        return False

    @property
    def errored(self) -> bool:
        return False

    @property
    def dead_error(self) -> BaseException:
        error: BaseException = EngineDeadError()
        return error

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing: engines are stopped by who started them."""
