"""What the runner tells the process of a subject, and what that answers, line by line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from gpu_check.checks import SubjectName
from gpu_check.records import Machine


class Bench(Protocol):
    """An opened subject."""

    def tail(self) -> str:
        """The last lines of what it has said, for the report of a check that failed."""


@dataclass(frozen=True, slots=True)
class Errand:
    """One life of a subject, and the checks that are made in it."""

    subject: SubjectName
    checks: tuple[str, ...]
    directory: str
    """For what the subject writes; the same for every errand of a run."""
    workspace_file: str
    """vLLM's one file; empty if there is none."""
    machine: Machine
    patience: float
    """By which every time that something may take is multiplied."""

    def write(self, path: Path) -> None:
        """Write the errand to `path`."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote."""
        record = json.loads(path.read_text())
        machine = Machine.from_record(record["machine"])
        return cls(**{**record, "checks": tuple(record["checks"]), "machine": machine})


@dataclass(frozen=True, slots=True)
class Answers:
    """A file with a JSON object on each line: `opened`, `ended` a check, or `refused`."""

    path: Path

    def tell(self, **answer: object) -> None:
        """Append one line."""
        with self.path.open("a") as file:
            file.write(f"{json.dumps(answer)}\n")

    def told(self) -> list[Mapping[str, Any]]:
        """Every whole line so far."""
        try:
            whole, _, _ = self.path.read_text().rpartition("\n")
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in whole.splitlines()]
