"""Does in a worker all that vLLM's front end and EngineCore do with a grammar.

The checks, the backend and the vocabulary are the same, so that what is slow there, or ends a
process, does so here first. Then it writes a few answers and fills masks, which EngineCore does
between two steps, while all requests wait (vLLM 0.32, 0.33). That refuses most grammars that are
too slow before they delay a step; EngineCore gives up the others, see `patches.grammars`.
"""

from __future__ import annotations

import importlib
import os
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from vllm.exceptions import VLLMError
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar
from vllm.v1.structured_output.request import get_structured_output_key

from holdfast.patches.grammar_steps import BURST_SECONDS, SECONDS_PER_TOKEN, GrammarBudget
from holdfast.patches.grammars import mask_words, vocabulary_tokens

Grammar = Mapping[str, Any]
"""The fields of vLLM's StructuredOutputsParams that a client has set."""

TRIAL_TOKENS = 64
"""The length of each answer that is tried."""
TRIAL_SECONDS = 0.2
"""CPU time after which no other token is tried: a usual schema needs a tenth."""
_MAX_MESSAGE_CHARACTERS = 1000
_CACHE_VARIABLE = "VLLM_XGRAMMAR_CACHE_MB"
_ERRORS = (
    VLLMError,
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What four libraries raise for a grammar that they do not accept."""
_NO_MEMORY = "std::bad_alloc"
"""What xgrammar makes of it when the kernel gives it no more memory."""
_BACKENDS = {
    "xgrammar": ("backend_xgrammar", "XgrammarBackend"),
    "guidance": ("backend_guidance", "GuidanceBackend"),
    "outlines": ("backend_outlines", "OutlinesBackend"),
    "lm-format-enforcer": ("backend_lm_format_enforcer", "LMFormatEnforcerBackend"),
}
"""As in `StructuredOutputManager.grammar_init`."""


class Compiler:
    """Compiles grammars for the model of one configuration."""

    def __init__(self, config: Any) -> None:
        os.environ[_CACHE_VARIABLE] = "1"  # the front end remembers results
        load_general_plugins()  # as EngineCore does: they may bring tokenizers
        self._config = config
        self._model = config.model_config
        self._tokenizer = (
            None
            if self._model.skip_tokenizer_init
            else cached_tokenizer_from_config(model_config=self._model)
        )
        self._model.hf_token = None  # native code that a client can attack must not have it
        self._backends: dict[str, Any] = {}
        self._named = config.structured_outputs_config.backend
        # Made before workers are forked, so that they share it. If that fails, each grammar gets
        # the error: lm-format-enforcer 0.11 imports a module that vLLM 0.32 no longer has.
        with suppress(ImportError):
            if self._tokenizer is not None:
                self._backend("xgrammar" if self._named == "auto" else self._named)

    def __call__(self, grammar: Grammar) -> dict[str, Any]:
        """Return an `error`, or the `backend` that vLLM chooses and the fields it `changed`.

        Raises:
            MemoryError: it takes more memory than this process may have.
        """
        try:
            return self._verdict(grammar)
        except MemoryError:
            raise
        except _ERRORS as error:
            if str(error) == _NO_MEMORY:
                raise MemoryError from error
            return {"error": str(error)[:_MAX_MESSAGE_CHARACTERS] or type(error).__name__}

    def _verdict(self, grammar: Grammar) -> dict[str, Any]:
        constraint = StructuredOutputsParams(**grammar)
        parameters = SamplingParams(structured_outputs=constraint)
        parameters.verify(
            self._model, None, self._config.structured_outputs_config, self._tokenizer
        )
        if constraint.structural_tag is not None and self._named == "auto":
            # vLLM's front end has xgrammar check it, even if another backend would accept it.
            validate_xgrammar_grammar(SamplingParams(structured_outputs=replace(constraint)))
        backend = constraint._backend  # noqa: SLF001 - where vLLM has it
        if backend is None:
            raise ValueError("no structured output backend supports this grammar")
        self._try(backend, constraint)
        changed = {
            field.name: now
            for field in fields(constraint)
            if not field.name.startswith("_")
            and (now := getattr(constraint, field.name)) != grammar.get(field.name, field.default)
        }
        was_auto = constraint._backend_was_auto  # noqa: SLF001 - as above
        return {"backend": backend, "was_auto": was_auto, "changed": changed}

    def _try(self, backend: str, constraint: Any) -> None:
        compiler = self._backend(backend)
        made = compiler.compile_grammar(*get_structured_output_key(constraint))
        tokens = vocabulary_tokens(compiler)
        mask = _mask_for(compiler)
        until_seconds = time.thread_time() + TRIAL_SECONDS
        for choose in _answers():
            _try_answer(made, mask, tokens, choose, until_seconds)
            made.reset()

    def _backend(self, name: str) -> Any:
        if name not in self._backends:
            module, backend = _BACKENDS[name]
            make = getattr(importlib.import_module(f"vllm.v1.structured_output.{module}"), backend)
            self._backends[name] = make(
                self._config, tokenizer=self._tokenizer, vocab_size=self._model.get_vocab_size()
            )
        return self._backends[name]


def _mask_for(backend: Any) -> torch.Tensor:
    """Return a bitmask of one request's allowed tokens.

    The backend's own would be in pinned memory, which would initialise a GPU here.
    """
    return torch.full((1, mask_words(backend)), -1, dtype=torch.int32)


class SlowGrammarError(ValueError):
    """Each token of the grammar would keep all requests waiting."""


def _answers() -> tuple[Callable[[Any], Any], ...]:
    """Return the ways to choose among the allowed tokens: a slow rule may follow any of them."""
    return (
        lambda allowed: allowed[allowed.size // 2],
        lambda allowed: allowed[0],
        lambda allowed: allowed[-1],
        random.Random(0).choice,  # noqa: S311 - no secret, and the same in each trial
    )


def _try_answer(
    made: Any,
    mask: torch.Tensor,
    tokens: int,
    choose: Callable[[Any], Any],
    until_seconds: float,
) -> None:
    """Write an answer and fill its masks, as EngineCore does.

    Raises:
        SlowGrammarError: that takes more than EngineCore allows.
        ValueError: it accepts no answer at all.
    """
    budget = GrammarBudget()
    token: int | None = None
    began_seconds = time.thread_time()
    for _ in range(TRIAL_TOKENS):
        if token is not None:
            made.accept_tokens("", [token])
        has_ended = made.is_terminated()
        if not has_ended:
            made.fill_bitmask(mask, 0)
        now_seconds = time.thread_time()
        if budget.spend(now_seconds - began_seconds, 1):
            raise SlowGrammarError(
                f"the grammar takes {now_seconds - began_seconds:.2f} s of CPU time per token; at "
                f"most {SECONDS_PER_TOKEN:g} s on average and {BURST_SECONDS:g} s are allowed"
            )
        bits = np.unpackbits(mask[0].numpy().view(np.uint8), bitorder="little")
        allowed = bits[:tokens].nonzero()[0]
        if token is None and not has_ended and not allowed.size:
            raise ValueError("the grammar allows no token, so no answer")
        if has_ended or not allowed.size or now_seconds > until_seconds:
            return
        token = int(choose(allowed))
        began_seconds = time.thread_time()
