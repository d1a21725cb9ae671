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
_BEGINNINGS: Mapping[str, re.Pattern[bytes]] = MappingProxyType(
    {
        as_json.NAME: re.compile(rb'\s*\{\s*"schema"\s*:\s*"holdfast-verify/'),
        "junit.xml": re.compile(rb'<\?xml[^>]*>\s*<testsuites name="holdfast verify"'),
        "test-result.json": re.compile(
            rb'\s*\{\s*"_type".*"predicateType".*"name": "holdfast verify --profile ', re.DOTALL
        ),
    }
)
"""Those of the forms that programs read, whatever version of the tool wrote them."""
_READ_BYTES = 100_000
"""The name of a model, which may be long, is in the beginning of a statement."""


def set_aside(directory: Path) -> None:
    """Rename the files of an earlier report: they would be taken for those of a run that fails.

    A file that programs read is only renamed if this tool wrote it, and the others are if it wrote
    one of those: files of these names may belong to another program.

    Raises:
        OSError: a file could not be read or renamed.
    """
    own = [name for name in _BEGINNINGS if _is_own(directory / name)]
    if not own:
        return
    # report.json comes last, and what is recognised behind the others: while one of these is there,
    # the next run goes on where an error ended this.
    others = [name for name in FORMS if name not in _BEGINNINGS]
    paths = [directory / name for name in (*others, *reversed(tuple(_BEGINNINGS)))]
    # What a report lacks is not taken from the one before it, which a part of a report leaves.
    if as_json.NAME in own and os.path.lexists(_earlier(paths[-1])):
        for path in paths:
            _earlier(path).unlink(missing_ok=True)
    for path in paths:
        if path.name in own or (path.name in others and os.path.lexists(path)):
            path.replace(_earlier(path))


def _earlier(path: Path) -> Path:
    return path.with_name(f"{path.name}{_EARLIER}")


def _is_own(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return _BEGINNINGS[path.name].match(file.read(_READ_BYTES)) is not None
    except PermissionError:
        if path.name == as_json.NAME:
            raise
        return False  # of another user's program, and in the way of no report


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
