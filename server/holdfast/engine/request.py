"""One call of `generate()` or `encode()`, and what has to be known of vLLM to make it."""

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
    """What vLLM says, and how it is answered."""

    def is_death(self, error: Exception, llm: Any) -> bool:
        """Whether it says that the engine is gone, not that the request is wrong."""

    def is_unsent(self, error: Exception) -> bool:
        """Whether a death found the call where the engine did not have it yet."""

    def is_abort(self, output: Any) -> bool:
        """Whether an output says that the engine gave the request up."""

    def lifted(self, error: HoldfastError) -> Exception:
        """The exception that makes vLLM's routes answer with `error`."""

    def is_replayable(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the same call can be made once more."""

    def is_streamed(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the prompt comes as a stream, for which the engine may have to wait."""

    def identity(self, arguments: Mapping[str, Any]) -> str:
        """The same digest, 64 hexadecimal digits, for the same prompt and parameters.

        May be called from another thread.
        """

    def size_bytes(self, arguments: Mapping[str, Any]) -> int:
        """About how much memory the prompt takes."""

    def for_trial(self, method: Method, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that make the engine yield after each token."""

    def context_tokens(self, output: Any) -> int:
        """Tokens of prompt and answer so far, in an output of a trial."""

    def prompt_tokens(self, output: Any) -> int:
        """Tokens of the prompt of an output."""

    def new_tokens(self, output: Any) -> int:
        """Tokens of the answer that came with an output and with none before it."""

    def request_ids(self, internal_id: str) -> tuple[str, ...]:
        """The `request_id` of a call that the engine may have named so: one, or one of two."""


@dataclass(slots=True, eq=False)
class Call:
    """One call, from its first step until its caller has left it."""

    method: Method
    arguments: Mapping[str, Any]
    context: RequestContext
    is_replayable: bool
    is_streamed: bool
    generation: int = 0
    """The one that has or had it; 0 if none."""
    is_in_engine: bool = False
    is_owed: bool = False
    """Whether its caller waits for the engine, and not the engine for its caller."""
    has_yielded: bool = False
    is_abort_expected: bool = False
    deaths: int = 0
    """Deaths in a row that it was in the engine for, and that are not explained."""
    reached_tokens: int = 0
    """Its context when the engine last died with it: a trial that gets further acquits it."""
    is_prefilling: bool = False
    """Whether the step that failed last computed a part of its prompt."""
    waiter: asyncio.Future[None] | None = None
    refusal: HoldfastError | None = None
    """Why no generation can make it any more."""
    digest: str | None = None
    """What it asks, see `Dialect.identity`; None until somebody wants to know."""
    digesting: Future[str] | None = None
    """What will be its digest, once its client has left it."""
    size_bytes: int = 0
    """Of its prompt, see `Dialect.size_bytes`; 0 until its client has left it."""

    @property
    def request_id(self) -> str:
        """As the caller gave it."""
        return str(self.arguments.get("request_id", ""))

    def forget_prompt(self) -> None:
        """Keep no more than its name: it cannot be made again."""
        self.arguments = {"request_id": self.request_id}
        self.is_replayable = False
