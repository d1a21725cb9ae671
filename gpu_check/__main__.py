"""The command line of the kit.

python -m gpu_check                     every check that this machine has what it takes for
python -m gpu_check --list              what there is
python -m gpu_check --only growth_under_graphs random_lives
"""

from __future__ import annotations

import argparse
import hashlib
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from gpu_check import lacks, process_tree, report, runner, survey, vllm_file
from gpu_check.checks import CHECKS, Check, Need
from gpu_check.records import FORMAT, CheckResult, Lack, Report

OUTPUT = survey.ROOT / "build" / "gpu-check"
RUN_SECONDS = 600.0
(VLLM,) = survey.project()["optional-dependencies"]["cuda"]
"""As Holdfast asks for it."""
PASSED, FAILED, NOTHING_RAN = 0, 1, 2


def main(given: Sequence[str] | None = None) -> int:
    """Make the checks, write the report and return the exit code."""
    began_seconds = time.monotonic()
    arguments = parsed(given)
    if arguments.list:
        print("\n".join(f"{check.name:<26}{check.subject:<10}{check.proves}" for check in CHECKS))
        return PASSED
    if unknown := set(arguments.only) - {check.name for check in CHECKS}:
        print(f"error: there is no check {', '.join(sorted(unknown))}; see --list", file=sys.stderr)
        return NOTHING_RAN
    try:
        _make_writable(arguments.output)
    except OSError as error:
        print(f"error: the report cannot be written to --output {error}", file=sys.stderr)
        return NOTHING_RAN
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with process_tree.nothing_left(), tempfile.TemporaryDirectory(prefix="gpu-check-") as directory:
        written = _checked(arguments, Path(directory), began_seconds)
    for path in report.write(written, arguments.output):
        print(f"written: {path}")
    if lines := [f"lacking: {lack.what}. Remedy: {lack.remedy}" for lack in written.lacks]:
        print("\n".join(lines))
    counts = ", ".join(f"{written.count(s)} {s}" for s in ("passed", "failed", "skipped"))
    print(f"{counts} in {written.duration_seconds:.0f} s")
    if written.count("failed"):
        return FAILED
    return PASSED if written.count("passed") else NOTHING_RAN


def _make_writable(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
        pass


def _checked(arguments: argparse.Namespace, directory: Path, began_seconds: float) -> Report:
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    machine = survey.survey(arguments.patience)
    file = _workspace_file(arguments, directory)
    found = lacks.lacks(machine, has_workspace_file=file is not None)
    asked = [check for check in CHECKS if not arguments.only or check.name in arguments.only]
    able = [check for check in asked if lacks.lack_of(check, found) is None]
    workplace = runner.Workplace(
        directory=directory,
        workspace_file=file,
        machine=machine,
        patience=arguments.patience,
        ends_at_seconds=began_seconds + run_seconds(arguments),
    )
    made = {}
    for result in runner.results(able, workplace):
        clean = _without_paths(result, directory)
        made[result.name] = clean
        print(_line(clean), flush=True)
    results = tuple(made.get(check.name) or _skipped(check, asked, found) for check in CHECKS)
    for result in results:
        if result.name not in made:
            print(_line(result))
    return Report(
        format=FORMAT,
        holdfast=str(survey.project()["version"]),
        commit=survey.commit(),
        workspace_file=hashlib.sha256(file.read_bytes()).hexdigest() if file else "",
        started_at=started_at,
        duration_seconds=round(time.monotonic() - began_seconds, 1),
        machine=machine,
        lacks=tuple(_distinct(found.values())),
        checks=results,
    )


def _workspace_file(arguments: argparse.Namespace, directory: Path) -> Path | None:
    given: Path | None = arguments.vllm
    if arguments.fetch_vllm:
        try:
            given = vllm_file.fetch(OUTPUT / "wheels", VLLM)
        except OSError as error:
            print(f"vLLM was not fetched: {error}", file=sys.stderr)
    content = vllm_file.read(given)
    if content is None:
        return None
    path = directory / "workspace.py"
    path.write_bytes(content)
    return path


def _skipped(check: Check, asked: Sequence[Check], found: Mapping[Need, Lack]) -> CheckResult:
    lack = lacks.lack_of(check, found)
    reason = lack.what if lack and check in asked else "not asked for"
    return CheckResult(check.name, check.subject, check.proves, "skipped", reason)


def _without_paths(result: CheckResult, directory: Path) -> CheckResult:
    """Without the folders of this user, since reports are sent to others."""
    folders = [(directory, "."), (survey.ROOT, ".")]
    with suppress(RuntimeError):  # the user has no home
        folders.append((Path.home(), "~"))

    def clean(text: str) -> str:
        for path, name in folders:
            if path != Path("/"):  # which is in each path, and tells nothing
                text = text.replace(str(path), name)
        return text

    return replace(result, reason=clean(result.reason), log_tail=clean(result.log_tail))


def _line(result: CheckResult) -> str:
    reason = f"  {' '.join(result.reason.split())[:300]}" if result.reason else ""
    return f"{result.status:<8}{result.name:<26}{result.duration_seconds:7.1f} s{reason}"


def _distinct(found: Iterable[Lack]) -> list[Lack]:
    return list(dict.fromkeys(found))


def run_seconds(arguments: argparse.Namespace) -> float:
    """How long the whole run may take: as given, or as the patience is."""
    given: float | None = arguments.run_seconds
    return RUN_SECONDS * arguments.patience if given is None else given


def parsed(given: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m gpu_check", description="Check Holdfast on this machine's GPU."
    )
    parser.add_argument("--list", action="store_true", help="print the checks and end")
    parser.add_argument("--only", nargs="+", default=[], metavar="CHECK", help="make these")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="where the report goes")
    parser.add_argument("--vllm", type=Path, help="vLLM's workspace.py, a folder or a wheel of it")
    parser.add_argument(
        "--fetch-vllm", action="store_true", help="have pip download a wheel of vLLM for it"
    )
    parser.add_argument("--patience", type=float, default=1.0, help="a factor for every deadline")
    parser.add_argument(
        "--run-seconds", type=float, help=f"for the whole run ({RUN_SECONDS:.0f}, times --patience)"
    )
    return parser.parse_args(given)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
