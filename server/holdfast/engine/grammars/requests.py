"""Checks in workers what vLLM compiles of a request in the front end, before it has parameters.

vLLM's request types have xgrammar check a structural tag, and with tools and a format its parsers
ask xgrammar whether it accepts the format: here they get an answer without native code. Cohere's
parser makes a grammar of each tool (`OnlineRenderer.preprocess_chat`, 0.32), which a worker tries
first.
"""

from __future__ import annotations

import json
from dataclasses import replace as with_fields
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import SamplingParams, StructuredOutputsParams, check_json_nesting
from vllm.v1.structured_output import backend_xgrammar
from vllm.v1.structured_output.utils import choice_as_grammar
from xgrammar import StructuralTag

from holdfast.engine.grammars.checker import GrammarChecker
from holdfast.patches.patch import original, replace

MAX_TOOL_BYTES = 64 << 10
"""The largest tool for Cohere's parser, which renames its rules one by one in the whole text."""

_COHERE = "vllm.parser.cohere_command"
"""It can be imported only if one of Cohere's packages is installed."""


def check_in_workers(grammars: GrammarChecker) -> None:
    """Have vLLM give xgrammar in this process only what `grammars` has accepted."""
    # Each caller looks it up in its module when it calls (0.32).
    backend_xgrammar.validate_xgrammar_grammar = validate_without_xgrammar
    _check_before_parsers(grammars)


def validate_without_xgrammar(parameters: SamplingParams) -> None:
    """Do the Python part of vLLM's `validate_xgrammar_grammar`; a worker does the rest.

    Raises:
        VLLMValidationError: xgrammar does not accept it.
    """
    constraint = parameters.structured_outputs
    if constraint is None:
        return
    check_json_nesting(constraint.json)
    check_json_nesting(constraint.structural_tag, structural_tag=True)
    try:
        if constraint.choice:
            constraint.grammar = choice_as_grammar(constraint.choice)
            constraint.choice = None
        elif constraint.json:
            schema = constraint.json
            schema = json.loads(schema) if isinstance(schema, str) else schema
            if backend_xgrammar.has_xgrammar_unsupported_json_features(schema):
                raise VLLMValidationError("xgrammar does not support all of the JSON schema.")
        elif constraint.structural_tag:
            _validate_tag(json.loads(constraint.structural_tag))
    except (LookupError, TypeError, ValueError) as error:
        raise VLLMValidationError("Invalid grammar specification.") from error


def _validate_tag(tag: Any) -> None:
    if "structures" in tag:
        for structure in tag["structures"]:
            json.dumps((structure["begin"], structure["schema"], structure["end"]))
    else:
        StructuralTag.model_validate(tag)


async def check_format(grammars: GrammarChecker | None, request: Any) -> None:
    """Have a worker try the output format that a chat or a response asks for, if there is one.

    vLLM converts every format for gpt-oss, and xgrammar takes minutes for some in Lark's syntax.
    """
    constraint = request.extract_structured_outputs()
    if grammars is not None and constraint is not None:
        await grammars.check(with_fields(constraint))


def _check_before_parsers(grammars: GrammarChecker) -> None:
    as_vllm = original(OnlineRenderer, "preprocess_chat")

    async def preprocess_chat(self: Any, request: Any, *args: Any, **options: Any) -> Any:
        # `/tokenize` takes tools, too, but has nothing generated that a grammar could bind.
        if getattr(request, "tools", None) and hasattr(request, "extract_structured_outputs"):
            await _check(grammars, request, options.get("parser") or getattr(self, "parser", None))
        return await as_vllm(self, request, *args, **options)

    replace(OnlineRenderer, "preprocess_chat", preprocess_chat)


async def _check(grammars: GrammarChecker, request: Any, parser: Any) -> None:
    await check_format(grammars, request)
    if any(kind.__module__ == _COHERE for kind in getattr(parser, "__mro__", ())):
        for tool in request.tools:
            await _check_tool(grammars, tool)


async def _check_tool(grammars: GrammarChecker, tool: Any) -> None:
    given = getattr(tool, "function", tool)
    schema = getattr(given, "parameters", None)
    if not schema:
        return
    if len(str(schema)) > MAX_TOOL_BYTES:
        raise VLLMValidationError(f"A tool of the request is larger than {MAX_TOOL_BYTES} bytes.")
    await grammars.check(StructuredOutputsParams(json=schema))
