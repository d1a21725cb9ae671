"""Text that all report formats share."""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence

from holdfast.configuration_record import Configuration, ModelFile
from holdfast.verify.records import (
    CheckResult,
    CheckStatus,
    Fault,
    HoldfastFacts,
    Limit,
    Number,
    Report,
    Request,
)
from holdfast.verify.target import ADMIN

_MAX_COMMAND_CHARACTERS = 2000


def counts(report: Report) -> str:
    """How many checks have which status: `12 passed, 1 failed`."""
    return ", ".join(f"{report.count(one)} {one}" for one in CheckStatus if report.count(one))


def full_name(check: CheckResult) -> str:
    """Group and name."""
    return f"{check.group}.{check.name}"


def value(number: Number) -> str:
    """The number with its unit; a share also with what it is one of, and its standard error."""
    said = f"{figure(number.value)} {number.unit}".rstrip()
    if number.standard_error is None or number.of is None:
        return said
    return f"{said} of {figure(number.of)}, standard error {number.standard_error:.1f} %"


def figure(number: float) -> str:
    """The number with as many digits as help."""
    if not math.isfinite(number):
        return str(number)
    if number == int(number) and abs(number) < 1e15:
        return f"{int(number):,}"
    return f"{number:,.4g}" if abs(number) < 10_000 else f"{number:,.0f}"


def duration(seconds: float) -> str:
    """The time in seconds, or in milliseconds if it is short; empty if there is none."""
    if not seconds:
        return ""
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{1000 * seconds:.0f} ms"


def limit(bound: Limit | None, unit: str = "") -> str:
    """The limit and where it came from; empty if there is none."""
    if bound is None:
        return ""
    return f"{bound.relation} {figure(bound.value)} {unit}".rstrip() + f" ({bound.source})"


def facts(report: Report) -> Iterator[tuple[str, str]]:
    """What was verified by what: names and values, without those that are not known."""
    server = report.server
    served = server.configuration or Configuration()
    known = {
        "server": server.url,
        "context": f"{server.max_model_len:,} tokens" if server.max_model_len else "",
        "vLLM": server.vllm,
        **(_holdfast(server.holdfast, served) if server.holdfast else {"served by": server.owner}),
        **_served(served),
        "profile": report.profile,
        "started": report.started_at.replace("T", " ").replace("+00:00", " UTC"),
        "took": f"{report.duration_seconds:.1f} s",
        "tool": f"holdfast verify {report.tool.version}",
    }
    return ((name, told) for name, told in known.items() if told)


def command(report: Report, request: Request) -> str:
    """A command for a shell that repeats the request; a variable stands for the key."""
    words = ["curl", "-sS"]
    if request.method not in ("GET", "POST"):
        words += ["-X", request.method]
    words.append(report.server.url.rstrip("/") + request.path)
    body = request.raw if request.body is None else json.dumps(request.body)
    sent = ["-H", "Content-Type: application/json", "-d", body] if body else []
    line = " ".join(filter(None, (shlex.join(words), _key(report, request), shlex.join(sent))))
    if len(line) > _MAX_COMMAND_CHARACTERS:
        return f"{line[:_MAX_COMMAND_CHARACTERS]} ... (report.json has all of it)"
    return line


def own_command(report: Report, check: CheckResult, fault: Fault) -> str:
    """The command that shows a fault; empty if there is none, or the check tells it anyway."""
    if fault.request is None or fault.request in check.requests:
        return ""
    return command(report, fault.request)


def model_files(files: Sequence[ModelFile]) -> str:
    """How many files the model has, how large they are, and a digest of the list.

    The digest is the SHA-256 of a line for each file: its SHA-256 or a dash, its size in bytes and
    its name, with spaces between them. Empty without files.
    """
    if not files:
        return ""
    lines = (f"{one.sha256 or '-'} {one.size_bytes} {one.name}\n" for one in files)
    digest = hashlib.sha256("".join(lines).encode(errors="replace")).hexdigest()
    unread = sum(not one.sha256 for one in files)
    beside = f", {unread} of them without a hash" if unread else ""
    total = size(sum(one.size_bytes for one in files))
    count = "1 file" if len(files) == 1 else f"{len(files)} files"
    return f"{count}, {total}, digest {digest[:16]}{beside}"


def size(size_bytes: int) -> str:
    """The size in the largest unit that it fills."""
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if size_bytes >= 10**power:
            return f"{size_bytes / 10**power:.1f} {unit}"
    return f"{size_bytes} bytes"


def settings(configuration: Configuration) -> Iterator[tuple[str, str]]:
    """What was given to the server and which files it serves: names and values, line by line."""
    yield "flags", shlex.join(configuration.flags)
    yield from configuration.variables.items()
    for file in configuration.files:
        source = "of the Hub " if file.hashed_by == "hub" else ""
        yield file.name, f"{size(file.size_bytes)}, SHA-256 {source}{file.sha256 or 'unknown'}"


def _key(report: Report, request: Request) -> str:
    """The header with the key that the run used, in quotes that let a shell fill in a variable."""
    if report.has_admin_key and request.path.startswith(ADMIN):
        return '-H "Authorization: Bearer $ADMIN_KEY"'
    return '-H "Authorization: Bearer $KEY"' if report.has_key else ""


def _served(told: Configuration) -> dict[str, str]:
    names = {"torch": "torch", "transformers": "transformers", "python": "Python"}
    counted = Counter(told.devices)
    devices = [f"{count} x {name}" if count > 1 else name for name, count in counted.items()]
    revision = f" at {told.revision}" if told.revision else ""
    return {
        "image": told.image,
        **{shown: told.versions.get(name, "") for name, shown in names.items()},
        "device": ", ".join(devices),
        "driver": told.driver,
        "fingerprint": told.fingerprint,
        "model": f"{told.model}{revision}",
        "files": model_files(told.files),
    }


def _holdfast(told: HoldfastFacts, served: Configuration) -> dict[str, str]:
    tokens = told.proof.get("proven_tokens")
    proven = f"{tokens:,} tokens" if isinstance(tokens, int) else "nothing"
    limited = ", limited" if told.proof.get("limited") else ""
    version = f"{served.versions['holdfast']}, " if "holdfast" in served.versions else ""
    return {
        "Holdfast": f"{version}{told.state}, generation {told.generation}",
        "proof": f"{proven}{limited}",
    }
