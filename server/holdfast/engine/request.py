"""One call of `generate()` or `encode()`, and the parts of vLLM needed to make it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from holdfast.errors import HoldfastError
from holdfast.request_context import RequestContext

Method = Literal["generate", "encode"]


class Dialect(Protocol):
    """Interprets what vLLM says, and answers in its terms."""

    def is_death(self, error: Exception, llm: Any) -> bool:
        """Whether an error says that the engine is gone, not that the request is wrong."""

    def is_unsent(self, error: Exception) -> bool:
        """Whether the engine died before it had the call."""

    def is_abort(self, output: Any) -> bool:
        """Whether an output says that the engine aborted the request."""

    def lifted(self, error: HoldfastError) -> Exception:
        """Return the exception that makes vLLM's routes answer with `error`."""

    def is_replayable(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the same call can be made again."""

    def is_streamed(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the prompt comes as a stream, which the engine may have to wait for."""

    def identity(self, arguments: Mapping[str, Any]) -> str:
        """Return a digest of the prompt and parameters, 64 hexadecimal digits.

        May be called from another thread.
        """

    def size_bytes(self, arguments: Mapping[str, Any]) -> int:
        """Estimate how much memory the prompt takes."""

    def for_trial(self, method: Method, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments that make the engine yield after each token."""

    def context_tokens(self, output: Any) -> int:
        """Count the tokens of prompt and answer so far, in an output of a trial."""

    def prompt_tokens(self, output: Any) -> int:
        """Count the tokens of an output's prompt."""

    def new_tokens(self, output: Any) -> int:
        """Count the answer's tokens that came with this output and with none before it."""

    def request_ids(self, internal_id: str) -> tuple[str, ...]:
        """List the values of `request_id` that the engine may have named so, one or two."""


@dataclass(slots=True, eq=False)
class Call:
    """One call, from its first step until its caller leaves it."""

    method: Method
    arguments: Mapping[str, Any]
    context: RequestContext
    is_replayable: bool
    is_streamed: bool
    generation: int = 0
    """The generation that has or had the call; 0 if none."""
    is_in_engine: bool = False
    is_owed: bool = False
    """Whether its caller waits for the engine, rather than the engine for its caller."""
    has_yielded: bool = False
    is_abort_expected: bool = False
    deaths: int = 0
    """How many unexplained deaths in a row found the call in the engine."""
    reached_tokens: int = 0
    """Its context at the engine's last death with it: a trial that gets further acquits it."""
    is_prefilling: bool = False
    """Whether the last failed step computed part of its prompt."""
    waiter: asyncio.Future[None] | None = None
    refusal: HoldfastError | None = None
    """Why no generation may run it any more."""
    digest: str | None = None
    """What it asks for, see `Dialect.identity`; None until that is needed."""
    digesting: Future[str] | None = None
    """The pending computation of its digest, started once its client leaves it."""
    size_bytes: int = 0
    """The size of its prompt, see `Dialect.size_bytes`; 0 until its client leaves it."""

    @property
    def request_id(self) -> str:
        """The name that the caller gave."""
        return str(self.arguments.get("request_id", ""))

    def forget_prompt(self) -> None:
        """Keep only its name: it cannot be made again."""
        self.arguments = {"request_id": self.request_id}
        self.is_replayable = False
