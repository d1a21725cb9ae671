"""Writes the report: JSON in the shape of `report.schema.json`, and the same for people."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from gpu_check.records import CheckResult, Measured, Report

_GIB = 1 << 30


def write(report: Report, directory: Path) -> tuple[Path, Path]:
    """`report.json` and `report.md` in `directory`; no path of this user stands in them."""
    directory.mkdir(parents=True, exist_ok=True)
    json_path, markdown_path = directory / "report.json", directory / "report.md"
    json_path.write_text(json.dumps(asdict(report), indent=1) + "\n")
    markdown_path.write_text(markdown(report))
    return json_path, markdown_path


def markdown(report: Report) -> str:
    """The report as a page."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    counts = ", ".join(f"{report.count(s)} {s}" for s in ("passed", "failed", "skipped"))
    yield f"# GPU check of Holdfast {report.holdfast}: {counts}"
    yield ""
    yield f"Begun {report.started_at}, took {report.duration_seconds:.0f} s."
    yield ""
    yield from _machine(report)
    yield ""
    yield "| check | subject | status | s | what it proves, or why not |"
    yield "|---|---|---|---|---|"
    for check in report.checks:
        said = check.reason or check.proves
        seconds = f"{check.duration_seconds:.1f}"
        yield f"| `{check.name}` | {check.subject} | {check.status} | {seconds} | {_cell(said)} |"
    for check in report.checks:
        yield from _details(check)


def _machine(report: Report) -> Iterator[str]:
    machine = report.machine
    yield "| what | is |"
    yield "|---|---|"
    for device in machine.devices:
        memory = "of host and device" if device.is_integrated else "of its own"
        size = f"{device.total_bytes / _GIB:.1f} GiB {memory}"
        yield f"| device | {_cell(device.name)}, capability {device.capability}, {size} |"
    build = " (build for CPUs)" if machine.is_vllm_for_cpu else ""
    told = {
        "commit": report.commit,
        "driver": machine.driver,
        "torch": " ".join(filter(None, (machine.torch, machine.cuda and f"CUDA {machine.cuda}"))),
        "vLLM": f"{machine.vllm}{build}" if machine.vllm else "",
        "workspace.py of vLLM": report.workspace_file[:16],
        "Python": machine.python,
        "system": f"{machine.system}, {machine.processor}",
    }
    for name, value in told.items():
        yield f"| {name} | {_cell(value) or 'none'} |"
    for lack in report.lacks:
        yield f"| lacking | {_cell(lack.what)}. Remedy: {_cell(lack.remedy)} |"


def _details(check: CheckResult) -> Iterator[str]:
    if not check.measured and not check.log_tail:
        return
    yield ""
    yield f"## {check.name}"
    if check.measured:
        yield ""
        yield from (f"* {one.name}: {_value(one)}" for one in check.measured)
    if check.log_tail:
        yield ""
        yield from (f"    {line}" for line in check.log_tail.splitlines())


def _value(measured: Measured) -> str:
    value = measured.value
    shown = f"{value:,}" if isinstance(value, int | float) else value
    return f"{shown} {measured.unit}".rstrip()


def _cell(text: str) -> str:
    return " ".join(text.replace("|", r"\|").split())
