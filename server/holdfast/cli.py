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
from holdfast.errors import ExitCode, HoldfastError, UsageError
from holdfast.planning import take_plan_flags
from holdfast.settings import ListenSettings, Settings, add_flags, read_groups
from holdfast.settings.flag import Parser, command_parser, key, seconds
from holdfast.settings.yaml_files import with_file, with_two_token_config

LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
_INTERRUPTED = 130
"""What shells report for SIGINT: a command that is cut short has not found that all is well."""
_DESCRIPTION = "An OpenAI-compatible server around vLLM whose green light is true."
_SERVE_EPILOG = """\
Every flag of `vllm serve` and its `--config FILE.yaml` work too; `holdfast serve --help=all` shows
them. Exit codes: 0 stopped cleanly, 1 unexpected, 2 bad usage or configuration, 3 engine could not
start, 4 probe failed, 5 engine lost, 6 address in use.
"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and end the process; the last line on standard error names a failure."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["serve"]:
        end_until_serving()
    code = _run(given)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the terminal may have been closed
            stream.flush()
    if "holdfast.serve" in sys.modules:
        # All our resources are released by now. Python's own shutdown would print pages of messages
        # from native libraries below our last line, and wait for vLLM's threads or its import.
        os._exit(code)
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    is_debugging = False
    unsupported.drop_empty(os.environ)
    try:
        command, rest = _command(arguments)
        if command != "serve":
            return _OTHER_COMMANDS[command](rest)
        if any(argument.startswith("--help=") for argument in rest):
            return _print_vllm_help(rest)
        settings = parse_serve(rest, os.environ)
        unsupported.refuse_missing_vllm()
        is_debugging = settings.listen.log_level == "debug"
        from holdfast.serve import serve  # noqa: PLC0415 - the web stack is not needed for --help

        return int(serve(settings))
    except HoldfastError as error:
        if is_debugging:
            _print_traceback()
        return _fail(error.line, error.exit_code)
    except KeyboardInterrupt:
        return ExitCode.STOPPED if arguments[:1] == ["serve"] else _INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the outermost edge: a clear line, whatever happened
        if is_debugging:
            _print_traceback()
        unexpected = HoldfastError(
            f"unexpected {type(error).__name__}: {error}",
            remedy="run it again with --log-level debug and report the traceback.",
        )
        return _fail(unexpected.line, ExitCode.UNEXPECTED)


def parse_serve(
    arguments: Sequence[str], environment: Mapping[str, str], *, needs_model: bool = True
) -> Settings:
    """Return the settings of `holdfast serve`, from flags, `--config` file and environment.

    vLLM's own flags are kept unchanged, except those that the listener needs. Without `needs_model`
    the model may be omitted or missing on this machine.

    Raises:
        UsageError: a value of ours is out of range, the file cannot be read, or the request is not
            supported.
        PluginMissingError: VLLM_PLUGINS leaves Holdfast out.
    """
    given = with_two_token_config(arguments)
    namespace, others = _serve_parser().parse_known_args(with_file(given))
    unsupported.refuse_mistyped(others)
    unsupported.refuse_environment(environment, is_demo=namespace.demo)
    unsupported.refuse_unsupported(namespace, environment)
    if needs_model:
        _check_model(given, namespace, others)
    _take_h11_limits(namespace)
    return Settings(
        is_demo=namespace.demo,
        listen=_listen_settings(namespace, environment),
        vllm_arguments=tuple(given),
        **read_groups(namespace, environment),
    )


def _command(arguments: list[str]) -> tuple[str, list[str]]:
    if arguments[:1] in (["serve"], ["plan"], ["doctor"], ["health"], ["verify"]):
        return arguments[0], arguments[1:]
    parser = Parser(prog="holdfast", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("serve", help="serve a model (see `holdfast serve --help`)")
    commands.add_parser(
        "plan", help="print what would be reserved, and why, without starting an engine"
    )
    commands.add_parser("doctor", help="check this machine and the flags, and name each hazard")
    commands.add_parser("verify", help="check whether what a server answers is right")
    commands.add_parser("health", help="exit with 0 if the server in this container is READY")
    commands.add_parser("version", help="print the versions of Holdfast, vLLM and torch")
    return str(parser.parse_args(arguments).command), []


def _serve_parser() -> argparse.ArgumentParser:
    usage = "MODEL [flags of vllm serve] [flags below]"
    parser = command_parser("serve", usage, _DESCRIPTION, _SERVE_EPILOG)
    # vLLM's parser reads MODEL: only it knows which of the flags before it take a value.
    parser.add_argument("--config", metavar="FILE.yaml", help="read flags from a file, as in vLLM")
    add_flags(parser)
    listener = parser.add_argument_group(
        "listener", "vLLM's flags that are needed before vLLM is loaded."
    )
    listener.add_argument("--host", type=_address, default="")
    listener.add_argument("--port", type=int, default=ListenSettings().port)
    for name in ("uds", "ssl-keyfile", "ssl-certfile", "ssl-ca-certs"):
        listener.add_argument(f"--{name}", type=_address)
    listener.add_argument("--ssl-ciphers")
    listener.add_argument("--ssl-cert-reqs", type=int, choices=(0, 1, 2), default=0)
    listener.add_argument("--enable-ssl-refresh", action=argparse.BooleanOptionalAction)
    listener.add_argument("--root-path", default="")
    listener.add_argument("--uvicorn-log-level", choices=(*LOG_LEVELS, "trace"), default="info")
    listener.add_argument("--disable-uvicorn-access-log", action="store_true")
    listener.add_argument("--disable-access-log-for-endpoints", default="")
    listener.add_argument("--api-key", nargs="*")
    for name in ("max-incomplete-event-size", "max-header-count"):
        listener.add_argument(f"--h11-{name}", help=argparse.SUPPRESS)
    listener.add_argument("--log-level", type=str.lower, choices=LOG_LEVELS, default="info")
    _add_unsupported(parser)
    return parser


def _add_unsupported(parser: argparse.ArgumentParser) -> None:
    """Add hidden flags that are read only to refuse them early."""
    for flag in unsupported.UNSUPPORTED:
        takes_value = flag.endswith("-rank")
        parser.add_argument(
            flag, action="store" if takes_value else "store_true", help=argparse.SUPPRESS
        )
    parser.add_argument("--api-server-count", type=int, help=argparse.SUPPRESS)
    for flag in ("--nnodes", "--data-parallel-size"):
        parser.add_argument(flag, type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--data-parallel-size-local", type=int, help=argparse.SUPPRESS)
    for flag in unsupported.UNSUPPORTED_SWITCHES:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
    for flag in ("--distributed-executor-backend", "--data-parallel-backend"):
        parser.add_argument(flag, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)


def _address(text: str) -> str:
    if "\0" in text:
        raise argparse.ArgumentTypeError("it contains a NUL")
    return text


def _check_model(given: list[str], namespace: argparse.Namespace, others: list[str]) -> None:
    """Refuse a model that is certainly wrong; between vLLM's flags only its parser can find it."""
    model = given[0] if given and not given[0].startswith("-") else namespace.model
    if model is not None:
        unsupported.refuse_model(model, is_demo=namespace.demo)
    elif not namespace.demo and all(argument.startswith("-") for argument in others):
        raise unsupported.no_model()


def _listen_settings(
    namespace: argparse.Namespace, environment: Mapping[str, str]
) -> ListenSettings:
    if not 0 <= namespace.port <= 65535:
        raise UsageError(f"--port: {namespace.port} is not a port.", remedy="use 0 to 65535.")
    if namespace.ssl_keyfile and not namespace.ssl_certfile:
        raise UsageError(
            "--ssl-keyfile was given without a certificate.", remedy="add --ssl-certfile."
        )
    if namespace.root_path and not namespace.root_path.startswith("/"):
        raise UsageError(
            f"--root-path: {namespace.root_path!r} does not begin with a slash.",
            remedy='begin it with "/".',
        )
    return ListenSettings(
        host=namespace.host,
        port=namespace.port,
        uds=namespace.uds,
        ssl_keyfile=namespace.ssl_keyfile,
        ssl_certfile=namespace.ssl_certfile,
        ssl_ca_certs=namespace.ssl_ca_certs,
        ssl_cert_reqs=namespace.ssl_cert_reqs,
        ssl_ciphers=namespace.ssl_ciphers,
        is_tls_refreshed=bool(namespace.enable_ssl_refresh),
        root_path=namespace.root_path.rstrip("/"),
        uvicorn_log_level=namespace.uvicorn_log_level,
        log_level=namespace.log_level,
        has_access_log=not namespace.disable_uvicorn_access_log,
        unlogged_paths=tuple(
            path.strip() for path in namespace.disable_access_log_for_endpoints.split(",") if path
        ),
        api_keys=_api_keys(namespace.api_key, environment.get("VLLM_API_KEY", "")),
        keep_alive_seconds=_keep_alive_seconds(environment),
    )


def _take_h11_limits(namespace: argparse.Namespace) -> None:
    """Treat vLLM's limits of headers, which it applies to h11 only, as aliases of ours."""
    if namespace.max_headers is None:
        namespace.max_headers = namespace.h11_max_header_count
    if namespace.max_header_size is None:
        namespace.max_header_size = namespace.h11_max_incomplete_event_size


def _keep_alive_seconds(environment: Mapping[str, str]) -> float:
    text = environment.get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE")
    try:
        return seconds(text) if text else ListenSettings().keep_alive_seconds
    except ValueError as error:
        raise UsageError(
            f"VLLM_HTTP_TIMEOUT_KEEP_ALIVE: {error}, not {text!r}.",
            remedy="correct it, or unset it and use --keep-alive-timeout.",
        ) from None


def _api_keys(given: list[str] | None, variable: str) -> tuple[str, ...]:
    """Return the keys of the flag, or the key of vLLM's variable. A UsageError repeats no key."""
    source, keys = ("VLLM_API_KEY", [variable]) if given is None else ("--api-key", given)
    if given is None and not variable:  # a Compose file passes an unset variable as empty
        return ()
    try:
        # An empty shell variable would open the server to everyone.
        return tuple(map(key, keys or [""]))
    except ValueError as error:
        raise UsageError(f"{source}: {error}.", remedy="correct it, or leave it out.") from None


def _print_vllm_help(arguments: list[str]) -> int:
    unsupported.refuse_missing_vllm()
    from holdfast.engine.arguments import print_help  # noqa: PLC0415 - imports vLLM

    print_help(arguments)
    return ExitCode.STOPPED


def _print_plan(arguments: list[str]) -> int:
    flags, others = take_plan_flags(arguments)
    # vLLM logs to standard output, where the plan is printed.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    settings = parse_serve(others, os.environ)
    unsupported.refuse_missing_vllm()
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


def _print_health(arguments: list[str]) -> int:
    from holdfast.health_check import print_health  # noqa: PLC0415 - not needed to serve

    return print_health(arguments, lambda given: parse_serve(given, {}, needs_model=False))


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
    "health": _print_health,
    "version": _print_versions,
}


def _print_traceback() -> None:
    import traceback  # noqa: PLC0415 - only when something failed

    traceback.print_exc()


def _fail(line: str, code: int) -> int:
    with suppress(OSError):  # the terminal may have been closed
        print(f"holdfast: error: {' '.join(line.split())}", file=sys.stderr, flush=True)  # noqa: T201 - the last line on standard error
    return code
