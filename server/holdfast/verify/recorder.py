"""`--record` and `--against`: what becomes of the files of baselines in a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from holdfast.errors import HoldfastError, UsageError
from holdfast.verify.answers import excerpt
from holdfast.verify.baseline import Baseline, Score, read_baseline, write_baseline
from holdfast.verify.directories import make_writable
from holdfast.verify.options import Options
from holdfast.verify.records import Report, Server, depth_of
from holdfast.verify.redaction import redacted
from holdfast.verify.tasks import score_key


def options_of(against: Path | None, record: Path | None) -> Options:
    """What the checks are told of both flags.

    Raises:
        UsageError: a file cannot be read, or will not be written.
    """
    if record is not None:
        _prepare(record)
    return Options(read_baseline(against) if against else None, records=record is not None)


def require_same_model(server: Server, options: Options, secrets: Sequence[str]) -> None:
    """Refuse to compare models.

    Raises:
        UsageError: the baseline belongs to a model that the server does not serve.
    """
    model = recorded_model(options)
    if model is not None and model not in server.models:
        served = redacted(excerpt(", ".join(map(repr, server.models))), secrets)
        raise UsageError(
            f"--against: the baseline is one of {model!r}, and the server serves {served}.",
            remedy="record a baseline of this model, or serve it under the recorded name.",
        )


def require_one_model(options: Options) -> None:
    """Refuse to verify one model and to compare another.

    Raises:
        UsageError: the baseline is not one of the model that `--model` names.
    """
    named, recorded = options.model, recorded_model(options)
    if named is not None and recorded is not None and named != recorded:
        raise UsageError(
            f"--against: the baseline is one of {recorded!r}, and --model names {named!r}.",
            remedy="name a baseline of this model, or leave --model out.",
        )


def recorded_model(options: Options) -> str | None:
    """The model that the baseline is one of; None without one."""
    origin = options.baseline.origin if options.baseline else None
    return origin.model if origin is not None else None


def keep(measured: Baseline | None, report: Report, path: Path, options: Options) -> str:
    """Write the baseline of a run that is over, and return a line about it.

    Raises:
        HoldfastError: it could not be written.
    """
    if measured is None or measured.origin is None or report.is_interrupted:
        return f"baseline: not written, and {path} is as before; see oracle.record in the report"
    numbers = [number for check in report.checks for number in check.numbers]
    depth = depth_of(report.profile)
    whole = replace(
        measured,
        scores={
            score_key(one.name, depth, options.tasks): Score(one.value, one.of)
            for one in numbers
            if one.of
        },
        recorded_at=report.started_at,
        origin=replace(measured.origin, verdict=report.verdict.value),
    )
    try:
        write_baseline(whole, _resolved(path))
    except ValueError as error:  # such as half of a surrogate pair in what the server says
        return f"baseline: not written, and {path} is as before: {excerpt(str(error))}"
    except OSError as error:
        raise HoldfastError(
            f"{path} could not be written: {error.strerror}.",
            remedy="make room there, or name another file with --record.",
        ) from None
    return f"baseline: {path}"


def _prepare(path: Path) -> None:
    """Find out before the run that there can be a file, in place of nothing or of another file."""
    try:
        target = _resolved(path)
        make_writable(target.parent)
        is_other = os.path.lexists(target) and not target.is_file()
        why = "it is not a regular file" if is_other else ""
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        raise UsageError(f"--record: {path} cannot be written: {why}.", remedy="name another file.")


def _resolved(path: Path) -> Path:
    """What the path leads to: a file is replaced, and a link to it stays one."""
    return Path(os.path.realpath(path))
