"""argv -> Settings -> run, and the only place that ends the process with an exit code.

Importing vLLM takes seconds, so nothing here does it: flags that need vLLM's parser are parsed
after the server has begun to listen, and `--help` never needs vLLM.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NoReturn

from holdfast import __version__
from holdfast.early_signals import end_until_serving
from holdfast.engine import unsupported
from holdfast.errors import ExitCode, HoldfastError
from holdfast.nodes.command_line import FollowSettings, of_headless, read_follow
from holdfast.planning import take_plan_flags
from holdfast.processes import imports
from holdfast.processes.environment import add_own_programs
from holdfast.settings import ListenSettings, Settings, add_flags, read_groups
from holdfast.settings.flag import Parser, command_parser
from holdfast.settings.listen_flags import add_listener_flags, listen_settings, take_aliases
from holdfast.settings.node_flags import add_node_flags, refuse_misfits
from holdfast.settings.variable_names import refuse_mistyped_variables
from holdfast.settings.yaml_files import with_file, with_two_token_config
from holdfast.telemetry.logs import without_controls

_NODES = ("serve", "follow")
"""The commands that run until a signal or a failure ends them."""
_INTERRUPTED = 130
"""What shells report for SIGINT: a command that is cut short has not found that all is well."""
_DESCRIPTION = (
    "An OpenAI-compatible server around vLLM that reports READY only after it has served its worst "
    "case."
)
_SERVE_EPILOG = """\
Every flag of `vllm serve` and its `--config FILE.yaml` work too; `holdfast serve --help=all` shows
them. Exit codes: 0 stopped cleanly, 1 unexpected, 2 bad usage or configuration, 3 engine could not
start, 4 probe failed, 5 engine lost, 6 address in use.
"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and end the process; the last line on standard error names a failure."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if _is_node(given):
        end_until_serving()
    code = _run(given)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the terminal may have been closed
            stream.flush()
    if not {"holdfast.serve", "holdfast.follow"}.isdisjoint(sys.modules):
        # All our resources are released by now. Python's own shutdown would print pages of messages
        # from native libraries below our last line, and wait for vLLM's threads or its import, or
        # for a thread that reads from a file system that hangs.
        os._exit(code)
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    is_debugging = False
    unsupported.drop_empty(os.environ)
    add_own_programs(os.environ)
    try:
        command, rest = _command(arguments)
        if command not in _NODES:
            return _OTHER_COMMANDS[command](rest)
        if command == "serve" and any(argument.startswith("--help=") for argument in rest):
            return _print_vllm_help(rest)
        settings = _node_settings(command, rest)
        unsupported.refuse_missing_vllm()
        is_debugging = settings.listen.log_level == "debug"
        return _run_node(settings)
    except HoldfastError as error:
        if is_debugging:
            _print_traceback()
        return _fail(error.line, error.exit_code)
    except KeyboardInterrupt:
        return ExitCode.STOPPED if _is_node(arguments) else _INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the outermost edge: a clear line, whatever happened
        if is_debugging:
            _print_traceback()
        unexpected = HoldfastError(
            f"unexpected {type(error).__name__}: {error}",
            remedy="run it again with --log-level debug and report the traceback.",
        )
        return _fail(unexpected.line, ExitCode.UNEXPECTED)


def _is_node(arguments: Sequence[str]) -> bool:
    return bool(arguments) and arguments[0] in _NODES


def _node_settings(command: str, arguments: Sequence[str]) -> Settings | FollowSettings:
    """Return the settings of a head or a follower; vLLM starts both with `serve`."""
    if command == "follow":
        return read_follow(arguments, os.environ)
    settings = parse_serve(arguments, os.environ)
    return of_headless(settings) if settings.node_rank else settings


def _run_node(settings: Settings | FollowSettings) -> int:
    if isinstance(settings, FollowSettings):
        from holdfast.follow import follow  # noqa: PLC0415 - the web stack is not needed for --help

        return follow(settings)
    from holdfast.serve import serve  # noqa: PLC0415 - as above

    return serve(settings)


def parse_serve(
    arguments: Sequence[str], environment: Mapping[str, str], *, needs_model: bool = True
) -> Settings:
    """Return the settings of `holdfast serve`, from flags, `--config` file and environment.

    vLLM's own flags are kept unchanged, except those that the listener needs. Without `needs_model`
    the model may be omitted or missing on this machine; a follower gets it from the head.

    Raises:
        UsageError: a value of ours is out of range, the file cannot be read, or the request is not
            supported.
        PluginMissingError: VLLM_PLUGINS leaves Holdfast out.
    """
    given = with_two_token_config(arguments)
    unsupported.refuse_repeated_keys(given)
    namespace, others = _serve_parser().parse_known_args(with_file(given, environment))
    unsupported.refuse_mistyped(others)
    refuse_mistyped_variables(environment)
    unsupported.refuse_environment(environment, is_demo=namespace.demo)
    unsupported.refuse_unsupported(namespace, environment)
    if needs_model and not namespace.node_rank:
        _check_model(given, namespace, others)
    take_aliases(namespace)
    groups = read_groups(namespace, environment)
    refuse_misfits(namespace, groups["nodes"])
    unsupported.refuse_no_proof(groups["probe"])
    return Settings(
        is_demo=namespace.demo,
        listen=listen_settings(namespace, environment),
        node_count=namespace.nnodes,
        node_rank=namespace.node_rank,
        master_address=namespace.master_addr or "",
        has_master_port=namespace.master_port is not None,
        vllm_arguments=tuple(given),
        **groups,
    )


def _command(arguments: list[str]) -> tuple[str, list[str]]:
    if arguments and arguments[0] in {*_NODES, "plan", "doctor", "health", "verify", "top"}:
        return arguments[0], arguments[1:]
    parser = Parser(prog="holdfast", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("serve", help="serve a model (see `holdfast serve --help`)")
    commands.add_parser("follow", help="run the ranks of another node for a server")
    commands.add_parser(
        "plan", help="print what would be reserved, and why, without starting an engine"
    )
    commands.add_parser("doctor", help="check this machine and the flags, and name each hazard")
    commands.add_parser("verify", help="check whether what a server answers is right")
    commands.add_parser("top", help="show the status page of a server in this terminal")
    commands.add_parser("health", help="exit with 0 if the server in this container is READY")
    commands.add_parser("version", help="print the versions of Holdfast, vLLM and torch")
    return str(parser.parse_args(arguments).command), []


def _serve_parser() -> argparse.ArgumentParser:
    usage = "MODEL [flags of vllm serve] [flags below]"
    parser = command_parser("serve", usage, _DESCRIPTION, _SERVE_EPILOG)
    # vLLM's parser reads MODEL: only it knows which of the flags before it take a value.
    parser.add_argument("--config", metavar="FILE.yaml", help="read flags from a file, as in vLLM")
    add_flags(parser)
    add_listener_flags(parser)
    add_node_flags(parser)
    _add_unsupported(parser)
    return parser


def _add_unsupported(parser: argparse.ArgumentParser) -> None:
    """Add hidden flags that are read only to refuse them early."""
    for flag, short in unsupported.UNSUPPORTED.items():
        takes_value = flag.endswith("-rank")
        parser.add_argument(
            *filter(None, (short, flag)),
            action="store" if takes_value else "store_true",
            help=argparse.SUPPRESS,
        )
    parser.add_argument("-asc", "--api-server-count", type=int, help=argparse.SUPPRESS)
    parser.add_argument("-dp", "--data-parallel-size", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("-dpl", "--data-parallel-size-local", type=int, help=argparse.SUPPRESS)
    for flag in unsupported.UNSUPPORTED_SWITCHES:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
    parser.add_argument("--distributed-executor-backend", help=argparse.SUPPRESS)
    parser.add_argument("-dpb", "--data-parallel-backend", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)


def _check_model(given: list[str], namespace: argparse.Namespace, others: list[str]) -> None:
    """Refuse a model that is certainly wrong; between vLLM's flags only its parser can find it."""
    # A word before the first flag of vLLM's is not a value of one.
    firsts = (*given[:1], *others[:1])
    model = next((word for word in firsts if not word.startswith("-")), namespace.model)
    if model is not None:
        unsupported.refuse_model(model, is_demo=namespace.demo)
    elif not namespace.demo and all(argument.startswith("-") for argument in others):
        raise unsupported.no_model()


def _print_vllm_help(arguments: list[str]) -> int:
    unsupported.refuse_missing_vllm()
    from holdfast.engine.launch.arguments import print_help  # noqa: PLC0415 - imports vLLM

    print_help(arguments)
    return ExitCode.STOPPED


def _print_plan(arguments: list[str]) -> int:
    flags, others = take_plan_flags(arguments)
    # vLLM logs to standard output, where the plan is printed.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    settings = parse_serve(others, os.environ)
    unsupported.refuse_missing_vllm()
    with imports.uncollected():
        from holdfast.planning.command import print_plan  # noqa: PLC0415 - it imports vLLM

    return print_plan(settings, flags)


def _print_findings(arguments: list[str]) -> int:
    from holdfast.doctor.command import print_findings  # noqa: PLC0415 - not needed to serve

    return print_findings(
        arguments,
        os.environ,
        expand=lambda given: with_file(with_two_token_config(given)),
        read_settings=partial(parse_serve, needs_model=False),
    )


def _verify(arguments: list[str]) -> int:
    from holdfast.verify.command import verify  # noqa: PLC0415 - not needed to serve

    return verify(arguments)


def _top(arguments: list[str]) -> int:
    from holdfast.top.command import top  # noqa: PLC0415 - not needed to serve

    return top(arguments)


def _print_health(arguments: list[str]) -> int:
    from holdfast.health_check import print_health  # noqa: PLC0415 - not needed to serve

    return print_health(arguments, _listen_of)


def _listen_of(command: str, arguments: Sequence[str]) -> ListenSettings:
    """Return where `serve` or `follow` listens with these arguments."""
    if command == "follow":
        return read_follow(arguments, os.environ).listen
    settings = parse_serve(arguments, os.environ, needs_model=False)
    return of_headless(settings).listen if settings.node_rank else settings.listen


def _print_versions(_arguments: list[str]) -> int:
    from holdfast.versions import installed_version, vllm_version  # noqa: PLC0415 - 20 ms

    print(f"holdfast {__version__}")  # noqa: T201 - what was asked for
    print(f"vllm {vllm_version()}")  # noqa: T201 - as above
    print(f"torch {installed_version('torch')}")  # noqa: T201 - as above
    return ExitCode.STOPPED


_OTHER_COMMANDS = {
    "plan": _print_plan,
    "doctor": _print_findings,
    "verify": _verify,
    "top": _top,
    "health": _print_health,
    "version": _print_versions,
}


def _print_traceback() -> None:
    import traceback  # noqa: PLC0415 - only when something failed

    traceback.print_exc()


def _fail(line: str, code: int) -> int:
    told = without_controls(" ".join(line.split()))
    with suppress(OSError):  # the terminal may have been closed
        print(f"holdfast: error: {told}", file=sys.stderr, flush=True)  # noqa: T201 - the last line on standard error
    return code
