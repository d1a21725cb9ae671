"""Runs the benchmarks one after the other, and writes `docs/benchmarks.md` from what they found.

    python benchmarks                        all of them, under half an hour on two cores
    python benchmarks serving memory         these
    python benchmarks --quick                try that they run
    python benchmarks --write                also write the page and its pictures
    python benchmarks --write none           write them from the last records

The record of each is kept as JSON in `build/benchmarks`, except for quick ones.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pairs
import plots

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "build" / "benchmarks"
PAGE = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"
TABLES_BEGIN = "<!-- tables: written by `python benchmarks --write` -->"
NAMES = ("hot_path", "streams", "connections", "serving", "seams", "memory", "growth")
"""`serving` measures the starts too, as `startup` does alone."""
_ALL = (*NAMES, "startup", "none")
DEADLINE_SECONDS = 1800.0


def _run(name: str, *, is_quick: bool) -> None:
    began = time.monotonic()
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--json"]
    done = subprocess.run(
        [*command, *(["--quick"] if is_quick else [])],
        check=False,
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    if done.returncode:
        sys.exit(f"error: {name} failed with {done.returncode}; see above.")
    record = json.loads(done.stdout)
    if not is_quick:
        RECORDS.mkdir(parents=True, exist_ok=True)
        _record_path(name).write_text(json.dumps(record, indent=1))
    print("\n".join(pairs.text_table(record)))
    print(f"({time.monotonic() - began:.0f} s)\n", flush=True)


def _write() -> None:
    """The tables below the mark, and a picture for each curve; what stands above the mark stays."""
    records = [json.loads(path.read_text()) for path in map(_record_path, NAMES) if path.exists()]
    for curve in (curve for record in records for curve in record["curves"]):
        (IMAGES / f"benchmark-{curve['name']}.svg").write_text(plots.svg(plots.Curve(**curve)))
    prose = PAGE.read_text().partition(TABLES_BEGIN)[0]
    PAGE.write_text("\n".join([f"{prose}{TABLES_BEGIN}", *_sections(records)]) + "\n")
    print(f"{PAGE} is written.")


def _record_path(name: str) -> Path:
    return RECORDS / f"{name}.json"


def _sections(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for record in records:
        yield f"\n## {record['benchmark'].replace('_', ' ').capitalize()}\n"
        curves = record["curves"]
        if record["benchmark"] != "growth":  # its rows are the pictures
            yield from pairs.markdown_table(record)
        for curve in curves:
            yield f"\n![{curve['title']}](images/benchmark-{curve['name']}.svg)"


def main() -> None:
    """Run what was named and write what was asked for."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(_ALL)}")
    parser.add_argument("--quick", action="store_true", help="few and short, no numbers to keep")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    if arguments.quick and arguments.write:
        parser.error("--quick has no numbers to write")
    if unknown := set(arguments.names) - set(_ALL):
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}")
    names = [name for name in arguments.names or NAMES if name != "none"]
    for name in names:
        _run(name, is_quick=arguments.quick)
    if arguments.write:
        _write()


if __name__ == "__main__":
    main()
