"""test-result.json: an in-toto statement, not signed, that a gate of releases can read.

https://github.com/in-toto/attestation/blob/main/spec/predicates/test-result.md
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from holdfast.configuration_record import Configuration
from holdfast.verify.records import CheckStatus, Report, Verdict
from holdfast.verify.report import wording

_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://in-toto.io/attestation/test-result/v0.1"
_DEPLOYED = ("model", "configuration")
"""What of `server` in report.json identifies a deployment."""
_REACHED = ("model", "owner", "url", "vllm")
"""The same where the server reports no configuration."""


def rendered(report: Report) -> str:
    """The file. Its subject is what was deployed, by a digest of what the server said of that."""
    statement = {
        "_type": _STATEMENT,
        "subject": [{"name": report.server.model, "digest": {"sha256": _digest(report)}}],
        "predicateType": _PREDICATE,
        "predicate": {
            "result": _result(report),
            "configuration": [
                {
                    "name": f"holdfast verify --profile {report.profile}",
                    "uri": f"pkg:generic/holdfast@{report.tool.version}",
                },
                *_served(report.server.configuration or Configuration()),
            ],
            "passedTests": _names(report, CheckStatus.PASSED),
            "warnedTests": _names(report, CheckStatus.WARNED, CheckStatus.INCONCLUSIVE),
            "failedTests": _names(report, CheckStatus.FAILED),
        },
    }
    return json.dumps(statement, indent=1) + "\n"


def _served(configuration: Configuration) -> Iterator[dict[str, Any]]:
    """The image and the files of the model, as far as a digest of them is known."""
    name, _, digest = configuration.image.partition("@sha256:")
    if digest:
        yield {"name": name, "digest": {"sha256": digest}}
    for file in configuration.files:
        if file.sha256:
            yield {"name": file.name, "digest": {"sha256": file.sha256}}


def _digest(report: Report) -> str:
    """SHA-256 of what identifies a deployment, as JSON without spaces and with sorted names.

    A gate compares it with that of another run, so nothing counts that changes while a server runs
    or that depends on how it was reached. Only the address identifies a server that has nothing
    else to say.
    """
    server = asdict(report.server)
    names = _DEPLOYED if report.server.configuration else _REACHED
    told = {name: server[name] for name in names}
    text = json.dumps(told, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _result(report: Report) -> str:
    """The predicate knows no inconclusive run; what a gate must not let pass has failed."""
    if report.verdict is not Verdict.PASSED:
        return "FAILED"
    return "WARNED" if report.count(CheckStatus.WARNED) else "PASSED"


def _names(report: Report, *statuses: CheckStatus) -> list[str]:
    return [wording.full_name(check) for check in report.checks if check.status in statuses]
