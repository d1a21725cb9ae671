"""Bounds how long the grammars of requests may stop an EngineCore, and what memory they take.

vLLM advances the grammars of a step and fills their masks in the scheduling loop, while every
request waits (`StructuredOutputManager.grammar_bitmask` and `accept_tokens`, 0.32). Nothing bounds
that: with `s ::= s s | "a"`, xgrammar takes longer for each token than for the one before, so no
trial of a grammar can exclude it. Here threads do it, within a budget of CPU time for each grammar,
see `grammar_steps`. A grammar that exceeds its budget ends with its request, and so does one that
compiles for too long, and one for which the grammars of all requests leave no memory, see
`grammar_memory`. The stop reason of the request tells the front end.

vLLM compiles all grammars with the backend of the first, although it checks each with the one that
it chooses for it (`StructuredOutputManager.grammar_init`, 0.32). So what xgrammar does not support
got 500 or was ignored, unless it came first. Here each grammar gets its own backend.

Importing this module is cheap: each function imports what it changes.
"""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import Future
from functools import partial
from typing import Any

from holdfast.patches.continued import sent_tokens
from holdfast.patches.grammar_compilation import Compilation, GivenUpGrammar
from holdfast.patches.grammar_memory import (
    GRAMMARS_AT_ONCE,
    LARGE_BYTES,
    GrammarMemory,
    compiled_bytes,
    give_back,
    most_grammar_bytes,
    private_bytes,
)
from holdfast.patches.grammar_steps import (
    SECONDS_PER_TOKEN,
    GrammarBudget,
    GrammarThreads,
    Job,
)
from holdfast.patches.patch import original, replace

DEAD_END = "holdfast: the grammar allows no token"
_TOKENS_A_WORD = 32


class BoundedGrammar:
    """A grammar of vLLM (`StructuredOutputGrammar`) that works only in threads.

    What vLLM's loop calls only notes what there is to do, or reads what a thread found.
    """

    def __init__(
        self, grammar: Any, key: tuple[Any, str], threads: GrammarThreads, backend: Any
    ) -> None:
        self._grammar = grammar
        self._threads = threads
        self._mask_words = mask_words(backend)
        self._mask: Any = None
        """Its own, since a thread that was given up may yet write to it. A row for each draft."""
        self._rows: Any = None
        self._budget = GrammarBudget(most_bytes=most_grammar_bytes(vocabulary_tokens(backend)))
        self.compiled_as: Hashable = key if hasattr(grammar, "ctx") else object()
        self.compiled_bytes = compiled_bytes(grammar, key[1])
        self._unread: list[int] = []
        """Tokens of the answer that the grammar has yet to accept."""
        self._has_ended: list[bool] = [False]
        """Whether it has terminated, after each number of drafts that it accepts."""
        self._at = 0
        self._is_drafting = False
        self.stop_reason = ""
        """Why it was given up; empty if it was not."""

    @property
    def grown_bytes(self) -> int:
        """How much memory its answer has added."""
        return self._budget.grown_bytes

    def filling(self, drafts: list[int]) -> Job | None:
        """Return the job that fills the masks of a step; None if the grammar was given up."""
        self._at, self._is_drafting = 0, bool(drafts)
        if self.stop_reason:
            return None
        work, tokens = partial(self._fill, drafts), 1 + len(drafts)
        return Job(work, self._filled, self.drop, self._budget, tokens)

    def end_drafts(self) -> None:
        """Take the next tokens as those of the answer."""
        self._is_drafting = False

    def accept_tokens(self, _request_id: str, tokens: list[int]) -> bool:
        """Note tokens of the answer, or go on to the next draft."""
        if self.stop_reason:
            return False
        if self._is_drafting:
            self._at += len(tokens)
            return self._at < len(self._has_ended)
        self._unread += tokens
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Return the drafts that the grammar accepts."""
        found: list[list[int]] = [[]]
        if not self.stop_reason:
            work = partial(self._validated, tokens)
            count = 1 + len(tokens)
            self._threads.run([Job(work, found.append, self.drop, self._budget, count)])
        return found[-1]

    def rollback(self, num_tokens: int) -> None:
        """Go back to an earlier draft."""
        self._at -= num_tokens

    def fill_bitmask(self, bitmask: Any, index: int) -> None:
        """Copy what a thread has filled; another backend may have made the row longer."""
        row, filled = bitmask.numpy()[index], self._rows[self._at]
        words = min(len(row), len(filled))
        row[:words], row[words:] = filled[:words], 0

    def is_terminated(self) -> bool:
        """Whether anything may follow."""
        return bool(self.stop_reason) or self._has_ended[self._at]

    def drop(self, reason: str) -> None:
        """Give it up, and free it once no thread works with it."""
        self.stop_reason = self.stop_reason or reason
        self._grammar = None

    def _read(self) -> Any:
        """Return the grammar, which has accepted all tokens of the answer."""
        grammar = self._grammar
        if grammar is None:
            raise ValueError("the grammar was dropped while a step began")
        unread, self._unread = self._unread, []
        if unread and not grammar.accept_tokens("", unread):
            raise ValueError("the grammar does not accept what was sampled")
        return grammar

    def _validated(self, tokens: list[int]) -> list[int]:
        found: list[int] = self._read().validate_tokens(tokens)
        return found

    def _fill(self, drafts: list[int]) -> list[bool]:
        """Return whether the grammar has ended after each draft; empty if no token may follow."""
        grammar = self._read()
        self._make_rows(1 + len(drafts))
        has_ended = [self._fill_row(grammar, 0)]
        if not has_ended[0] and not self._rows[0].any():
            return []
        for draft in drafts:
            if has_ended[-1] or not grammar.accept_tokens("", [draft]):
                break
            has_ended.append(self._fill_row(grammar, len(has_ended)))
        if len(has_ended) > 1:
            grammar.rollback(len(has_ended) - 1)
        return has_ended

    def _make_rows(self, rows: int) -> None:
        import torch  # noqa: PLC0415 - see the module's docstring

        if self._rows is None or len(self._rows) < rows:
            self._mask = torch.full((rows, self._mask_words), -1, dtype=torch.int32)
            self._rows = self._mask.numpy()

    def _fill_row(self, grammar: Any, row: int) -> bool:
        if grammar.is_terminated():
            return True
        grammar.fill_bitmask(self._mask, row)
        return False

    def _filled(self, has_ended: list[bool]) -> None:
        if has_ended:
            self._has_ended = has_ended
        else:
            self.drop(DEAD_END)


class _GrammarBounds:
    """What the grammars of one StructuredOutputManager share."""

    def __init__(self, manager: Any) -> None:
        self.threads = GrammarThreads()
        tokens = manager.vllm_config.model_config.get_vocab_size()
        self.memory = GrammarMemory(GRAMMARS_AT_ONCE * most_grammar_bytes(tokens))
        self.compilers: dict[str, _Compiler] = {}


class _Compiler:
    """A StructuredOutputManager as vLLM's methods see it that compile for one backend."""

    def __init__(self, manager: Any, bounds: _GrammarBounds) -> None:
        self._manager = manager
        self._bounds = bounds
        self.backend: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def _create_grammar(self, request: Any) -> BoundedGrammar:
        """Compile the grammar of a request, in a thread of vLLM."""
        before_bytes = private_bytes()
        made = type(self._manager)._create_grammar(self, request)  # noqa: SLF001 - it takes any self
        if private_bytes() > before_bytes + LARGE_BYTES:
            give_back()
        key = request.structured_output_request.structured_output_key
        bounded = BoundedGrammar(made, key, self._bounds.threads, self.backend)
        self._bounds.memory.hold(bounded)
        return bounded


def bound_grammars(compile_seconds: float) -> None:
    """Have an EngineCore in this process bound its grammars, and the time to compile each."""
    from vllm.v1.structured_output import StructuredOutputManager  # noqa: PLC0415 - as above
    from vllm.v1.structured_output.backend_types import (  # noqa: PLC0415 - as above
        StructuredOutputGrammar,
    )

    for kind in (BoundedGrammar, GivenUpGrammar):
        StructuredOutputGrammar.register(kind)  # vLLM asserts it in places

    initialise = original(StructuredOutputManager, "grammar_init")
    fill = original(StructuredOutputManager, "grammar_bitmask")
    accept = original(StructuredOutputManager, "accept_tokens")

    def begin(manager: Any, request: Any) -> None:
        if (wanted := request.structured_output_request) is None:
            return
        compiler = _compiler(manager, request.sampling_params.structured_outputs._backend)  # noqa: SLF001 - where vLLM has it
        initialise(compiler, request)
        manager.backend = manager.backend or compiler.backend
        made = wanted._grammar  # noqa: SLF001 - the property reads its result
        if isinstance(made, Future):
            # A new grammar is given the tokens of an answer that another engine has begun, too.
            begun_tokens = len(sent_tokens(request.sampling_params))
            seconds = compile_seconds + begun_tokens * SECONDS_PER_TOKEN
            wanted.grammar = Compilation(made, seconds)

    def fill_bounded(manager: Any, requests: Any, names: Any, drafts: Any) -> Any:
        if jobs := _jobs(manager, [requests[name] for name in names], drafts):
            bounds = _bounds(manager)
            bounds.memory.grew(bounds.threads.run(jobs))
        try:
            return fill(manager, requests, names, drafts)
        finally:
            for name in drafts.keys() & names:
                requests[name].structured_output_request.grammar.end_drafts()

    def accept_bounded(manager: Any, request: Any, tokens: Any) -> bool:
        is_accepted: bool = accept(manager, request, tokens)
        if not is_accepted:
            request.stop_reason = request.structured_output_request.grammar.stop_reason or None
        return is_accepted

    replace(StructuredOutputManager, "grammar_init", begin)
    replace(StructuredOutputManager, "grammar_bitmask", fill_bounded)
    replace(StructuredOutputManager, "accept_tokens", accept_bounded)


def vocabulary_tokens(backend: Any) -> int:
    """Return how many tokens the masks of a backend are for."""
    return int(getattr(backend, "ll_tokenizer", backend).vocab_size)


def mask_words(backend: Any) -> int:
    """Return the length of a backend's masks.

    A backend allocates its own in pinned memory, and each request would need some of it.
    """
    return -(-vocabulary_tokens(backend) // _TOKENS_A_WORD)


def _jobs(manager: Any, requests: list[Any], drafts: Any) -> list[Job]:
    """Return what has to be done before `grammar_bitmask` of these requests."""
    jobs = []
    for request in requests:
        wanted, tokens = request.structured_output_request, drafts.get(request.request_id, ())
        accepted: list[int] = []
        is_masked = True
        if tokens or not (manager.reasoner_cls is None or wanted.reasoning_ended):
            accepted, is_masked = _drafted(manager, request, list(tokens))
        if is_masked and (job := wanted.grammar.filling(accepted)) is not None:
            jobs.append(job)
    return jobs


def _drafted(manager: Any, request: Any, tokens: list[int]) -> tuple[list[int], bool]:
    """Return the drafts that the grammar is given, and whether a mask applies after any."""
    from vllm.v1.structured_output.utils import (  # noqa: PLC0415 - as above
        strip_speculative_padding,
    )

    drafts = strip_speculative_padding(tokens)
    bounds = manager._get_constraint_bounds(request, drafts)  # noqa: SLF001 - vLLM has no other name for it
    return drafts[bounds.grammar_start :], bounds.constraint_start <= len(drafts)


def _bounds(manager: Any) -> _GrammarBounds:
    if not hasattr(manager, "holdfast_bounds"):
        manager.holdfast_bounds = _GrammarBounds(manager)
    bounds: _GrammarBounds = manager.holdfast_bounds
    return bounds


def _compiler(manager: Any, backend: str) -> _Compiler:
    bounds = _bounds(manager)
    return bounds.compilers.setdefault(backend, _Compiler(manager, bounds))
