"""The flags of `holdfast verify`, what it does in which order, and its exit code."""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

from holdfast import __version__
from holdfast.errors import UsageError
from holdfast.remote_server import base_url, check_proxies, read_key
from holdfast.settings.flag import Parser, command_parser
from holdfast.terminal import say
from holdfast.verify import packages
from holdfast.verify.baseline import Baseline
from holdfast.verify.check import FROM_STANDARD
from holdfast.verify.checks import ALL, oracle
from holdfast.verify.checks.oracle import recording
from holdfast.verify.checks.skill import lm_eval
from holdfast.verify.diff import diff
from holdfast.verify.directories import make_writable
from holdfast.verify.interruption import noticed, unless
from holdfast.verify.options import Options
from holdfast.verify.page import show_on_page
from holdfast.verify.progress import view_on
from holdfast.verify.recorder import (
    keep,
    options_of,
    recorded_model,
    require_one_model,
    require_same_model,
)
from holdfast.verify.records import (
    PROFILES,
    CheckStatus,
    Profile,
    Report,
    Tool,
    Verdict,
    depth_of,
)
from holdfast.verify.redaction import redacted
from holdfast.verify.report import FORMS, set_aside, write
from holdfast.verify.runner import RunContext, judge, run
from holdfast.verify.soak_plan import plan_of
from holdfast.verify.survey import ask_facts, survey
from holdfast.verify.target import Target
from holdfast.verify.tasks import read_tasks

EXIT_CODES = MappingProxyType({Verdict.PASSED: 0, Verdict.FAILED: 7, Verdict.INCONCLUSIVE: 8})
"""Beside 1, 2 and 3, which errors have."""
_EPILOG = """\
`holdfast verify diff A B` shows what changed from one report to another.

The report is written to --out as report.json, report.md, report.html, junit.xml and
test-result.json; the names of an earlier one there get .earlier behind them. Ctrl-C ends the run
and leaves a report of what ran. Exit codes: 0 passed, 1 the report could not be written, 2 bad
usage, 3 the server is not reachable, 7 failed, 8 inconclusive.
"""


def verify(arguments: Sequence[str]) -> int:
    """Verify a server, write the report and return the exit code; or compare two reports.

    Raises:
        UsageError: a flag or a proxy is wrong, or the server asks for another key.
        NotReachableError: there is no such server, or it is not ready.
        HoldfastError: the report could not be written.
    """
    if arguments[:1] == ["diff"]:
        return diff(arguments[1:])
    flags = verify_parser().parse_args(arguments)
    check_proxies()
    url = base_url(flags.url)
    key, options = read_key(flags.api_key_file), _options(flags)
    admin_key = read_key(flags.admin_api_key_file, "--admin-api-key-file")
    directory: Path = flags.out
    _prepare(directory)
    try:
        report, measured = asyncio.run(_run(url, (key, admin_key), flags.profile, options))
        counts = ", ".join(f"{report.count(s)} {s}" for s in CheckStatus if report.count(s))
        say(f"{report.verdict} in {report.duration_seconds:.1f} s: {counts}", sys.stdout)
        try:
            say(f"report: {write(report, directory)}", sys.stdout)
        finally:  # it took as long to measure as the report, and has a place of its own
            if flags.record:
                say(keep(measured, report, flags.record, options), sys.stdout)
    except KeyboardInterrupt:
        say("inconclusive: interrupted before there was a report", sys.stdout)
        return EXIT_CODES[Verdict.INCONCLUSIVE]
    if admin_key:
        say(_shown(url, admin_key, report), sys.stdout)
    return EXIT_CODES[report.verdict]


def verify_parser() -> Parser:
    """The parser of the flags."""
    parser = command_parser(
        "verify",
        "URL [flags]",
        "Check whether a server's answers are right. Works with any OpenAI-compatible server.",
        _EPILOG,
    )
    parser.add_argument("url", metavar="URL", help="its address, for example http://spark:8000")
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="the model to check, of several that the server lists; the default is the first that "
        "is not a LoRA adapter",
    )
    known = [p for p in PROFILES if any(p in check.profiles for check in ALL)]
    parser.add_argument(
        "--profile", choices=known, default="quick", help="how much to check; the default is quick"
    )
    parser.add_argument(
        "--hours",
        type=float,
        metavar="H",
        help="how long the soak of --profile soak lasts, from 0.01 to 168; the default is 6",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("holdfast-verify"),
        metavar="DIR",
        help="directory for the report; the default is holdfast-verify",
    )
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="file that contains a key of the server"
    )
    parser.add_argument(
        "--admin-api-key-file",
        type=Path,
        metavar="FILE",
        help="file that contains the admin key of the server, to show the verdict on its status "
        "page and to restart the engine in --profile full",
    )
    parser.add_argument(
        "--tasks",
        type=Path,
        metavar="FILE",
        help="your own tasks: on each line a JSON object with a prompt and what is expected",
    )
    parser.add_argument(
        "--lm-eval",
        metavar="TASKS",
        help="tasks of lm-eval, which must be installed: names with commas between them, or a "
        "directory with *.yaml files",
    )
    parser.add_argument(
        "--kill-command",
        type=_words,
        default=(),
        metavar="CMD",
        help="command that kills the server's engine, to see whether answers outlive it",
    )
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="write a baseline of the server to this file"
    )
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="compare the server with this baseline"
    )
    return parser


def _options(flags: Namespace) -> Options:
    """What the checks look at.

    Raises:
        UsageError: a file cannot be read, or a value is not as it must be.
    """
    soak = plan_of(flags.hours, flags.profile)
    _require_kill(flags.kill_command, flags.profile)
    tasks = read_tasks(flags.tasks) if flags.tasks else ()
    harness = lm_eval.tasks_of(flags.lm_eval) if flags.lm_eval is not None else ""
    found = replace(options_of(flags.against, flags.record), model=flags.model)
    require_one_model(found)
    kill = flags.kill_command
    return replace(found, tasks=tasks, lm_eval=harness, kill_command=kill, soak=soak)


def _require_kill(command: Sequence[str], profile: Profile) -> None:
    """Refuse a command that would not be run.

    Raises:
        UsageError: no check of the profile kills an engine.
    """
    if command and profile not in FROM_STANDARD:
        raise UsageError(
            f"--kill-command: the profile {profile} kills no engine.",
            remedy="add --profile standard or full, or leave --kill-command out.",
        )


def _words(command: str) -> tuple[str, ...]:
    """The words of a command, which no shell reads."""
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise ArgumentTypeError(f"{command!r} has {str(error).lower()}") from None
    if not words:
        raise ArgumentTypeError("it names no command")
    return words


async def _run(
    url: str, keys: tuple[str, str], profile: Profile, options: Options
) -> tuple[Report, Baseline | None]:
    """The report, and what was measured for a baseline."""
    started_at, started_seconds = datetime.now(UTC), time.monotonic()
    checks = [c for c in ALL if profile in c.profiles and oracle.is_asked_for(c, options)]
    with noticed() as interrupted:
        async with Target(url, *keys) as target:
            surveying = survey(target, recorded_model(options), named=options.model)
            server = await unless(interrupted, surveying)
            if server is None:
                raise KeyboardInterrupt
            require_same_model(server, options, target.secrets)
            context = RunContext(target, server, depth_of(profile), interrupted, options)
            with view_on(sys.stdout, len(checks)) as view:
                results = await run(checks, context, view)
            is_interrupted = interrupted.is_set()
            is_asked_again = server.holdfast and not is_interrupted
            after = await unless(interrupted, ask_facts(target)) if is_asked_again else None
    verdict, reason = judge(results, is_interrupted=is_interrupted)
    report = Report(
        tool=Tool(__version__, packages.installed()),
        profile=profile,
        started_at=started_at.isoformat(timespec="seconds"),
        duration_seconds=round(time.monotonic() - started_seconds, 3),
        server=server,
        verdict=verdict,
        reason=reason,
        is_interrupted=is_interrupted,
        checks=results,
        after=after,
        has_key=bool(keys[0]),
        has_admin_key=bool(keys[1]),
    )
    measured: Baseline | None = context.measured.get(recording.measured)
    return redacted(report, target.secrets), redacted(measured, target.secrets)


def _shown(url: str, admin_key: str, report: Report) -> str:
    """A line that says whether the status page shows the verdict."""
    try:
        return asyncio.run(show_on_page(url, admin_key, report))
    except KeyboardInterrupt:
        return "the status page may not show the verdict: interrupted"


def _prepare(path: Path) -> None:
    """Find out before the run that there can be a report, and have no other one there."""
    try:
        make_writable(path)
        _require_places(path)
        set_aside(path)
    except OSError as error:
        raise UsageError(
            f"--out: cannot write a report to {path}: {error}.", remedy="name another directory."
        ) from None


def _require_places(path: Path) -> None:
    """Refuse a directory where a file of the report goes, such as Docker makes for a lost mount.

    Raises:
        UsageError: there is one.
    """
    for file in map(path.joinpath, FORMS):
        if file.is_dir() and not file.is_symlink():
            raise UsageError(
                f"--out: {file} is a directory, and the report has a file of that name.",
                remedy="remove it, or name another directory.",
            )
