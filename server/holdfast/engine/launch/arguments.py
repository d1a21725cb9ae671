"""Parses the command line with vLLM's own parser, and refuses what Holdfast cannot do."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, NoReturn

import vllm.logger as vllm_logger
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.serve.utils import api_utils
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from holdfast import settings as ours
from holdfast.demo.files import demo_directory, ensure_demo_model
from holdfast.engine import unsupported
from holdfast.engine.model import model_files
from holdfast.engine.vllm_errors import usage_errors
from holdfast.errors import UsageError, reason_of
from holdfast.settings import Settings
from holdfast.settings.listen_flags import ALIASES, paths_of, take_aliases
from holdfast.settings.variable_names import check_rest

try:
    from vllm.entrypoints.launchers import cli_args
except ImportError:  # moved in 0.33 without a shim (seen in the 0.33.0 wheel)
    from vllm.entrypoints.common import cli_args

DEMO_NAME = "holdfast-demo"
"""What clients call the demo model; its path would say nothing."""


_UNKNOWN = "unrecognized arguments: "
_LIKENESS = 0.75
"""How similar a mistyped flag is to the one that may be meant."""
DEMO_KV_CACHE_BYTES = 256 * 1024 * 1024


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM is Any to us
    """Raises our error for bad usage instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        known = self._option_string_actions
        meant = " or ".join(
            _likely_flags(message, [flag for flag in known if flag.startswith("--")])
        )
        see = "see `holdfast serve --help=all`."
        remedy = f"did you mean {meant}? If not, {see}" if meant else see
        raise UsageError(f"{_without_values(message)}.", remedy=remedy)


def parse(settings: Settings) -> argparse.Namespace:
    """Return what vLLM makes of the command line, with `model` and the flags that we fix.

    The parser has no sub-commands: with them vLLM drops `flag: false` of a `--config` file.

    Raises:
        UsageError: a flag is unknown or wrong, or asks for what Holdfast cannot do.
    """
    _choose_start_method()
    with usage_errors():
        parser = _parser()
        check_rest(os.environ, parser._option_string_actions)  # noqa: SLF001 - argparse has no list of its flags
        parser.set_defaults(**dict.fromkeys(ALIASES.values()))  # else none seems to be absent
        namespace: argparse.Namespace = parser.parse_args(list(settings.vllm_arguments))
    take_aliases(namespace)
    if namespace.root_path:  # vLLM finds no route below one that ends in a slash
        namespace.root_path = namespace.root_path.rstrip("/")
    unsupported.refuse_unsupported(namespace, os.environ)
    _refuse_abbreviations(namespace, settings)
    _forget_keys(namespace)
    namespace.model = _model(namespace, is_demo=settings.is_demo)
    if settings.is_demo:
        _set_demo_defaults(namespace)
    namespace.api_server_count = None
    namespace.shutdown_timeout = int(settings.supervision.drain_timeout_seconds)
    model_files.check_template(namespace.chat_template)
    with usage_errors():
        _import_parsers(namespace)
        _validate(namespace)
    return namespace


def parse_ranks(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what vLLM makes of flags that `nodes.handed_flags` chose on another node.

    Raises:
        UsageError: a flag is unknown or wrong: this is another version of vLLM.
    """
    _choose_start_method()
    with usage_errors():
        namespace: argparse.Namespace = _parser().parse_args(list(arguments))
        _import_reasoning_parser(namespace)
    namespace.model = _model(namespace, is_demo=namespace.demo)
    if namespace.demo:
        _set_demo_defaults(namespace)
    return namespace


def engine_arguments(namespace: argparse.Namespace) -> AsyncEngineArgs:
    """Return the engine's part of the parsed command line."""
    with usage_errors():
        arguments = AsyncEngineArgs.from_cli_args(namespace)
        cli_args.propagate_flash_late_interaction(namespace, arguments)
    return arguments


def configure_logging(namespace: argparse.Namespace) -> None:
    """Let vLLM log as its flags and variables say.

    Raises:
        UsageError: it cannot; its own errors name neither the flag nor the variable.
    """
    if not hasattr(vllm_logger, "configure_logging_from_args"):
        return
    try:
        vllm_logger.configure_logging_from_args(namespace)
    except (AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        said = _logging_error(error)
        raise UsageError(
            f"{_logging_source(namespace, said)}: vLLM cannot log by it: {said}.",
            remedy="correct it, or leave it out.",
        ) from error


def _logging_error(error: BaseException) -> str:
    """Return the first cause, to which `logging` adds what it configured at that moment."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error.args[0]) if error.args else ""
    # vLLM gives an error its values as one gives them to a logger.
    return text % error.args[1:] if text.count("%s") == len(error.args) - 1 > 0 else str(error)


def _logging_source(namespace: argparse.Namespace, said: str) -> str:
    """Return what vLLM's logging follows; a file of `logging` replaces all other settings."""
    variable = os.environ.get("VLLM_LOGGING_CONFIG_PATH")
    config = getattr(namespace, "logging_config", None)
    if flag := getattr(namespace, "log_config_file", None):
        return f"--log-config-file {flag}"
    if config is not None and config.pylogging_config_file not in {None, variable}:
        return f"--logging-config {config.pylogging_config_file}"
    if variable:
        return f"VLLM_LOGGING_CONFIG_PATH {variable}"
    return "VLLM_LOGGING_LEVEL" if "Unknown level" in said else "VLLM_LOGGING_STREAM"


def print_help(arguments: Sequence[str]) -> None:
    """Print vLLM's help with our flags in it, for `--help=all`, a group or a keyword."""
    try:
        _parser().parse_args(list(arguments))
    except SystemExit:
        return


def _parser() -> FlexibleArgumentParser:
    parser = _Parser(prog="holdfast serve")
    ours.add_flags(parser)
    return make_arg_parser(parser)


def make_arg_parser(parser: Any) -> Any:
    """Add vLLM's flags to `parser`; `--log-level` accepts lower case too, as uvicorn's does."""
    parser = cli_args.make_arg_parser(parser)
    for action in parser._actions:  # noqa: SLF001 - argparse has no look-up by flag
        if "--log-level" in action.option_strings:
            action.type = str.upper
    return parser


def _choose_start_method() -> None:
    """Let vLLM choose the start method of its processes."""
    if hasattr(api_utils, "cli_env_setup"):
        api_utils.cli_env_setup()
    else:  # moved in 0.33
        from vllm.entrypoints.common import startup  # noqa: PLC0415

        startup.cli_env_setup()


def _import_parsers(namespace: Any) -> None:
    """Import the parsers that the operator has written, as `vllm serve` does before its checks.

    If a file cannot be imported, vLLM logs it, and its check says which parser is unknown.
    """
    if namespace.tool_parser_plugin:
        ToolParserManager.import_tool_parser(namespace.tool_parser_plugin)
    _import_reasoning_parser(namespace)


def _import_reasoning_parser(namespace: Any) -> None:
    """Import the reasoning parser that the operator has written; a configuration needs it."""
    if namespace.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(namespace.reasoning_parser_plugin)


def _validate(namespace: Any) -> None:
    """Run vLLM's own checks of its parsed flags and of the parsers that they name."""
    if namespace.enable_auto_tool_choice:
        tool_parsers = ToolParserManager.list_registered()
        _refuse_unknown("tool call parser", namespace.tool_call_parser, tool_parsers)
    reasoning_parsers = ReasoningParserManager.list_registered()
    _refuse_unknown("reasoning parser", namespace.reasoning_parser, reasoning_parsers)
    cli_args.validate_parsed_serve_args(namespace)
    if hasattr(cli_args, "validate_api_server_args"):
        cli_args.validate_api_server_args(namespace)
    else:  # moved to cli_args in 0.33
        from vllm.entrypoints.launchers import launcher  # noqa: PLC0415

        launcher.validate_api_server_args(namespace)


def _refuse_unknown(kind: str, name: str | None, known: Sequence[str]) -> None:
    """Raise a UsageError for a name that is not known: vLLM's own lists dozens of others."""
    if name and name not in known:
        meant = get_close_matches(name, known, 1)
        others = f"did you mean {meant[0]}?" if meant else f"use one of {', '.join(sorted(known))}."
        raise UsageError(f"{name!r} is not a {kind}.", remedy=others)


def _without_values(message: str) -> str:
    """Strip values from what argparse says of unknown flags: one may be a mistyped key."""
    begin, unknown, rest = message.partition(_UNKNOWN)
    if not unknown:
        return re.sub("=.* could match ", " could match ", message, flags=re.DOTALL)
    words = rest.split()
    shown = [word.partition("=")[0] for word in words if word.startswith("-")]
    if others := len(words) - len(shown):
        shown.append(f"{others} word{'s' * (others > 1)} without a flag")
    return f"{begin}{unknown}{', '.join(shown)}"


def _likely_flags(message: str, known: Sequence[str]) -> list[str]:
    """Return the known flags that are most similar to the unknown ones."""
    _, _, rest = message.partition(_UNKNOWN)
    words = [word.partition("=")[0] for word in rest.split() if word.startswith("--")]
    return [flag for word in words for flag in get_close_matches(word, known, 1, _LIKENESS)]


def _set_demo_defaults(namespace: argparse.Namespace) -> None:
    if namespace.served_model_name is None:
        namespace.served_model_name = [DEMO_NAME]
    if namespace.kv_cache_memory_bytes is None and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        # Plenty for the demo, and it leaves the machine its memory.
        namespace.kv_cache_memory_bytes = DEMO_KV_CACHE_BYTES
    if namespace.dtype == "auto":
        # vLLM's `auto` would narrow it, so that greedy tokens differ from those of transformers.
        namespace.dtype = "float32"


def _refuse_abbreviations(namespace: argparse.Namespace, settings: Settings) -> None:
    for flag, theirs, read in _read_by_both(namespace, settings):
        if theirs != read:
            raise UsageError(f"{flag} is abbreviated.", remedy="write it in full.")


def _forget_keys(namespace: argparse.Namespace) -> None:
    """Leave the keys to `api.auth`, so that vLLM neither checks nor prints them."""
    namespace.api_key = None
    for flag in ours.flags():
        if flag.is_secret:
            setattr(namespace, flag.destination, None)


_LISTS = ("allowed_origins", "allowed_methods", "allowed_headers")
_READ_ABOVE = frozenset({"log_level", *_LISTS})


def _read_by_both(
    namespace: argparse.Namespace, settings: Settings
) -> Iterator[tuple[str, Any, Any]]:
    """Yield each flag that our parser read first, with what vLLM's and ours made of it.

    vLLM's completes `--work` and `--por`. Ours does not: it knows too few flags to be sure.
    """
    yield "--demo", namespace.demo, settings.is_demo
    for name, group in ours.read_groups(namespace, os.environ).items():
        for member in fields(group):
            flag: ours.Flag = member.metadata["flag"]
            read = getattr(getattr(settings, name), member.name)
            theirs = getattr(group, member.name)
            # A key may come from the environment, from which it has been removed.
            yield flag.name, read if flag.is_secret and theirs is None else theirs, read
    yield "--nnodes", namespace.nnodes, settings.node_count
    yield "--node-rank", namespace.node_rank, settings.node_rank
    yield "--headless", namespace.headless, settings.node_rank > 0
    yield (
        "--master-addr",
        namespace.master_addr,
        settings.master_address or AsyncEngineArgs.master_addr,
    )
    listen = settings.listen
    # Without the flag, vLLM leaves out the attribute; a key may come from the environment.
    level: str = getattr(namespace, "log_level", listen.log_level)
    yield "--log-level", level.lower(), listen.log_level
    yield "--api-key", tuple(namespace.api_key or listen.api_keys), listen.api_keys
    yield "--allow-credentials", namespace.allow_credentials, listen.allows_credentials
    yield "--enable-ssl-refresh", bool(namespace.enable_ssl_refresh), listen.is_tls_refreshed
    has_access_log = not namespace.disable_uvicorn_access_log
    yield "--disable-uvicorn-access-log", has_access_log, listen.has_access_log
    unlogged = paths_of(namespace.disable_access_log_for_endpoints or "")
    yield "--disable-access-log-for-endpoints", unlogged, listen.unlogged_paths
    for list_name in _LISTS:
        flag_name = "--" + list_name.replace("_", "-")
        yield flag_name, tuple(getattr(namespace, list_name)), getattr(listen, list_name)
    for member in fields(listen):
        if hasattr(namespace, member.name) and member.name not in _READ_ABOVE:
            name = "--" + member.name.replace("_", "-")
            # A flag that is not given is None in vLLM's and empty in ours.
            yield name, getattr(namespace, member.name) or "", getattr(listen, member.name) or ""


def _model(namespace: argparse.Namespace, *, is_demo: bool) -> str:
    named = namespace.model_tag or (
        namespace.model if namespace.model != AsyncEngineArgs.model else None
    )
    if named is not None:
        unsupported.refuse_model(str(named), is_demo=is_demo)
        return str(named)
    if not is_demo:
        raise unsupported.no_model()
    directory = demo_directory()
    try:
        return str(ensure_demo_model(directory))
    except OSError as error:
        raise UsageError(
            f"the demo model cannot be kept in {directory}: {reason_of(error)}.",
            remedy="make room there, or set XDG_CACHE_HOME to a directory that is writable.",
        ) from error
