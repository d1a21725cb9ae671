"""Writes the report, each time the same in another form; no form has more than report.json.

A module makes one form, or what several of them share:

    as_json   report.json, in the shape of `docs/schemas/holdfast-verify-1.schema.json`
    markdown  report.md, for an issue or a chat
    page      report.html, one file without scripts; `charts` draws in it, report.css dresses it
    junit     junit.xml, for what shows the tests of a build
    in_toto   test-result.json, a statement for what decides about a release
    markup    elements of HTML and SVG
    wording   the words in which every form says the same
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from holdfast.errors import HoldfastError
from holdfast.verify.records import Report
from holdfast.verify.report import as_json, in_toto, junit, markdown, page

FORMS: Mapping[str, Callable[[Report], str]] = MappingProxyType(
    {
        as_json.NAME: as_json.rendered,
        "report.md": markdown.rendered,
        "report.html": page.rendered,
        "junit.xml": junit.rendered,
        "test-result.json": in_toto.rendered,
    }
)
"""What renders a report, by the name of the file."""
_EARLIER = ".earlier"
"""Behind the name: what collects `*.xml` or `**/report.json` does not take an earlier one."""
_BEGINNING = re.compile(rb'\s*\{\s*"schema"\s*:\s*"holdfast-verify/')
"""That of a report.json, whatever version of the tool wrote it."""
_READ_BYTES = 200


def set_aside(directory: Path) -> None:
    """Rename the files of an earlier report: they would be taken for those of a run that fails.

    Without a report.json of this tool, files of these names belong to another program.

    Raises:
        OSError: a file could not be read or renamed.
    """
    if not _is_report(directory / as_json.NAME):
        return
    # report.json comes last: while it is there, the next run goes on where an error ended this.
    paths = [directory / name for name in reversed(tuple(FORMS))]
    if os.path.lexists(_earlier(paths[-1])):  # what a report lacks is not taken from that
        for path in paths:
            _earlier(path).unlink(missing_ok=True)
    for path in filter(os.path.lexists, paths):
        path.replace(_earlier(path))


def _earlier(path: Path) -> Path:
    return path.with_name(f"{path.name}{_EARLIER}")


def _is_report(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return _BEGINNING.match(file.read(_READ_BYTES)) is not None


def write(report: Report, directory: Path) -> Path:
    """Write every form into an existing directory, and return the path of the page.

    Raises:
        HoldfastError: a file could not be written; the others are.
    """
    lost: dict[str, OSError] = {}
    for name, rendered in FORMS.items():
        try:
            # A server may have answered with half a character, which has no encoding.
            _replace(directory / name, rendered(report).encode(errors="replace"))
        except OSError as error:
            lost[str(directory / name)] = error
    if lost:
        first = next(iter(lost.values()))
        raise HoldfastError(
            f"{', '.join(lost)} could not be written: {first.strerror}.",
            remedy="make room there, or name another directory with --out.",
        )
    return directory / "report.html"


def _replace(path: Path, content: bytes) -> None:
    """Write a file in place of one that this user may not be allowed to change."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)  # not `write_atomically`: others read reports, too
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
