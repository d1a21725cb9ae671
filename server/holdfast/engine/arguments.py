"""vLLM's command line: parsed by vLLM's own parser, with what Holdfast cannot do refused."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, NoReturn

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from holdfast import settings as ours
from holdfast.demo.files import demo_directory, ensure_demo_model
from holdfast.engine import compat, named_files, unsupported
from holdfast.engine.vllm_errors import usage_errors
from holdfast.errors import UsageError
from holdfast.settings import Settings

DEMO_NAME = "holdfast-demo"
"""What clients call the demo model, whose path says nothing."""


_UNKNOWN = "unrecognized arguments: "
_LIKENESS = 0.75
"""Of a mistyped flag to the one that may be meant."""
DEMO_KV_CACHE_BYTES = 256 * 1024 * 1024


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM is Any to us
    """Answers bad usage with our error instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        known = self._option_string_actions
        meant = " or ".join(_meant(message, [flag for flag in known if flag.startswith("--")]))
        see = "see `holdfast serve --help=all`."
        remedy = f"did you mean {meant}? If not, {see}" if meant else see
        raise UsageError(f"{_without_values(message)}.", remedy=remedy)


def parse(settings: Settings) -> argparse.Namespace:
    """What vLLM makes of the command line, with `model`, `log_level` and the fixed flags set.

    The parser is flat, because with sub-commands vLLM drops `flag: false` of a `--config` file.

    Raises:
        UsageError: a flag is unknown or wrong, or asks for what Holdfast cannot do.
    """
    compat.cli_env_setup()
    with usage_errors():
        namespace: argparse.Namespace = _parser().parse_args(list(settings.vllm_arguments))
    if namespace.root_path:  # vLLM finds no route below one that ends in a slash
        namespace.root_path = namespace.root_path.rstrip("/")
    unsupported.refuse_unsupported(namespace, os.environ)
    _refuse_abbreviations(namespace, settings)
    _forget_keys(namespace)
    namespace.model = _model(namespace, settings)
    if settings.is_demo:
        _set_demo_defaults(namespace)
    namespace.api_server_count = None
    namespace.shutdown_timeout = int(settings.supervision.drain_timeout_seconds)
    named_files.check_template(namespace.chat_template)
    with usage_errors():
        compat.validate(namespace)
    return namespace


def engine_arguments(namespace: argparse.Namespace) -> AsyncEngineArgs:
    """The engine's part of the parsed command line."""
    with usage_errors():
        arguments = AsyncEngineArgs.from_cli_args(namespace)
        compat.propagate(namespace, arguments)
    return arguments


def print_help(arguments: Sequence[str]) -> None:
    """Print vLLM's help with our flags in it, for `--help=all`, a group or a keyword."""
    try:
        _parser().parse_args(list(arguments))
    except SystemExit:
        return


def _parser() -> FlexibleArgumentParser:
    parser = _Parser(prog="holdfast serve")
    ours.add_flags(parser)
    return compat.make_arg_parser(parser)


def _without_values(message: str) -> str:
    """What argparse says of flags it does not know, without values: one may be a mistyped key."""
    begin, unknown, rest = message.partition(_UNKNOWN)
    if not unknown:
        return re.sub("=.* could match ", " could match ", message, flags=re.DOTALL)
    words = rest.split()
    shown = [word.partition("=")[0] for word in words if word.startswith("-")]
    if others := len(words) - len(shown):
        shown.append(f"{others} word{'s' * (others > 1)} without a flag")
    return f"{begin}{unknown}{', '.join(shown)}"


def _meant(message: str, known: Sequence[str]) -> list[str]:
    """The flags that are the most like those that argparse does not know."""
    _, _, rest = message.partition(_UNKNOWN)
    words = [word.partition("=")[0] for word in rest.split() if word.startswith("--")]
    return [flag for word in words for flag in get_close_matches(word, known, 1, _LIKENESS)]


def _set_demo_defaults(namespace: argparse.Namespace) -> None:
    if namespace.served_model_name is None:
        namespace.served_model_name = [DEMO_NAME]
    if namespace.kv_cache_memory_bytes is None and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        # Plenty for it, and the machine that tries it out is not taken whole.
        namespace.kv_cache_memory_bytes = DEMO_KV_CACHE_BYTES
    if namespace.dtype == "auto":
        # vLLM's `auto` would narrow it, and its greedy tokens would differ from transformers'.
        namespace.dtype = "float32"


def _refuse_abbreviations(namespace: argparse.Namespace, settings: Settings) -> None:
    for flag, theirs, read in _read_by_both(namespace, settings):
        if theirs != read:
            raise UsageError(f"{flag} is abbreviated.", remedy="write it in full.")


def _forget_keys(namespace: argparse.Namespace) -> None:
    """Leave the keys to the front door, so that vLLM neither checks nor prints them."""
    namespace.api_key = None
    for flag in ours.flags():
        if flag.is_secret:
            setattr(namespace, flag.destination, None)


def _read_by_both(
    namespace: argparse.Namespace, settings: Settings
) -> Iterator[tuple[str, Any, Any]]:
    """Each flag that our parser reads first, with what vLLM's and ours made of it.

    vLLM's completes `--work` and `--por`, ours does not: it knows too few flags to be sure.
    """
    yield "--demo", namespace.demo, settings.is_demo
    for name, group in ours.read_groups(namespace, os.environ).items():
        for member in fields(group):
            flag: ours.Flag = member.metadata["flag"]
            read = getattr(getattr(settings, name), member.name)
            theirs = getattr(group, member.name)
            # A key may come from the environment, where nobody finds it any more.
            yield flag.name, read if flag.is_secret and theirs is None else theirs, read
    listen = settings.listen
    # vLLM leaves the attribute out if the flag is not given; a key may come from the environment.
    level: str = getattr(namespace, "log_level", listen.log_level)
    yield "--log-level", level.lower(), listen.log_level
    yield "--api-key", tuple(namespace.api_key or listen.api_keys), listen.api_keys
    for member in fields(listen):
        if hasattr(namespace, member.name) and member.name != "log_level":
            name = "--" + member.name.replace("_", "-")
            # What is not given is None in vLLM's and empty in ours.
            yield name, getattr(namespace, member.name) or "", getattr(listen, member.name) or ""


def _model(namespace: argparse.Namespace, settings: Settings) -> str:
    named = namespace.model_tag or (
        namespace.model if namespace.model != AsyncEngineArgs.model else None
    )
    if named is not None:
        unsupported.refuse_model(str(named), is_demo=settings.is_demo)
        return str(named)
    if not settings.is_demo:
        raise unsupported.no_model()
    return str(ensure_demo_model(demo_directory()))
