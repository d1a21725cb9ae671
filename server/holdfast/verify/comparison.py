"""What changed from one report to another: statuses, numbers, and what was verified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.configuration_record import Configuration
from holdfast.verify.records import CheckResult, CheckStatus, Report
from holdfast.verify.report import wording
from holdfast.verify.survey import given_flags

_WORST_FIRST = (
    CheckStatus.FAILED,
    CheckStatus.INCONCLUSIVE,
    CheckStatus.WARNED,
    CheckStatus.SKIPPED,
    CheckStatus.PASSED,
)


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is not the same in both reports."""

    what: str
    before: str
    after: str
    """Each is empty if its report does not have the thing."""
    status: CheckStatus | None = None
    """The status of the check, in the report that has it last."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class ComparedReports:
    """Two reports side by side."""

    statuses: tuple[Change, ...]
    """The worst first."""
    numbers: tuple[Change, ...]
    """The numbers that differ in the four digits that are shown, or in their limits."""
    configuration: tuple[Change, ...]
    same_statuses: int
    same_numbers: int
    same_settings: int


def compare(before: Report, after: Report) -> ComparedReports:
    """Compare two reports, which may be of different servers, profiles and versions."""
    checks = {wording.full_name(check): check for one in (before, after) for check in one.checks}
    statuses = sorted(
        (
            Change(one.what, one.before, one.after, checks[one.what].status, _why(one, checks))
            for one in _changes(_statuses(before), _statuses(after))
        ),
        key=lambda change: _WORST_FIRST.index(change.status or CheckStatus.PASSED),
    )
    before_numbers, after_numbers = _numbers(before), _numbers(after)
    numbers = _changes(before_numbers, after_numbers)
    configuration = _changes(_settings(before), _settings(after))
    return ComparedReports(
        statuses=tuple(statuses),
        numbers=numbers,
        configuration=configuration,
        same_statuses=len(checks) - len(statuses),
        same_numbers=len(before_numbers | after_numbers) - len(numbers),
        same_settings=len(_settings(before) | _settings(after)) - len(configuration),
    )


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Change, ...]:
    pairs = ((name, before.get(name, ""), after.get(name, "")) for name in {**before, **after})
    return tuple(Change(name, old, new) for name, old, new in pairs if old != new)


def _why(change: Change, checks: Mapping[str, CheckResult]) -> str:
    """Why the check has its status; not if the later report does not have the check."""
    return checks[change.what].reason if change.after else ""


def _statuses(report: Report) -> dict[str, str]:
    return {wording.full_name(check): check.status.value for check in report.checks}


def _numbers(report: Report) -> dict[str, str]:
    """Each number with its limit, by the names of the check and of the number."""
    found: dict[str, list[str]] = {}
    for check in report.checks:
        for one in check.numbers:
            bound = wording.limit(one.limit, one.unit)
            said = f"{wording.value(one)}, {bound}" if bound else wording.value(one)
            beyond = "" if one.is_within else " (beyond it)"
            found.setdefault(f"{wording.full_name(check)}: {one.name}", []).append(said + beyond)
    return {name: "; ".join(said) for name, said in found.items()}


def _settings(report: Report) -> dict[str, str]:
    """What was verified by what, one thing a name; what is not known is left out."""
    server = report.server
    told = server.configuration or Configuration()
    proof = server.holdfast.proof if server.holdfast else {}
    known = {
        "profile": report.profile,
        "tool": report.tool.version,
        **{f"package {name}": version for name, version in report.tool.packages.items()},
        "server": server.url,
        "model": server.model,
        "served by": server.owner,
        "context": f"{server.max_model_len:,} tokens" if server.max_model_len else "",
        "image": told.image,
        "version of vllm": server.vllm,
        **{f"version of {name}": version for name, version in told.versions.items()},
        **{f"flag {name}": value for name, value in given_flags(told.flags).items()},
        **{f"variable {name}": value for name, value in told.variables.items()},
        "fingerprint": told.fingerprint,
        "devices": ", ".join(told.devices),
        "driver": told.driver,
        "max_num_batched_tokens": str(told.max_num_batched_tokens or ""),
        "max_num_seqs": str(told.max_num_seqs or ""),
        "model from": told.model,
        "revision": told.revision,
        **{
            f"file {file.name}": f"{file.size_bytes:,} bytes, SHA-256 {file.sha256 or 'unknown'}"
            for file in told.files
        },
        **{f"proof: {name}": str(value) for name, value in proof.items()},
        **{f"can answer {name}": "yes" for name in server.abilities},
        **{f"route {path}": "yes" for path in server.routes},
    }
    return {name: value for name, value in known.items() if value}
