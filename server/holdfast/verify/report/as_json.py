"""report.json: everything, for programs; it can be read back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from holdfast.errors import UsageError
from holdfast.verify.records import SCHEMA, CheckStatus, Report

NAME = "report.json"
_REPORT = TypeAdapter(Report)
_MAX_BYTES = 64 * 1024 * 1024


def document(report: Report) -> dict[str, Any]:
    """The report as JSON has it: a number that is not finite becomes a string."""
    counts = {status.value: report.count(status) for status in CheckStatus}
    whole = asdict(report)
    schema = whole.pop("schema")
    return {"schema": schema, **_finite(whole), "counts": counts}


def rendered(report: Report) -> str:
    """The file."""
    return json.dumps(document(report), indent=1, allow_nan=False) + "\n"


def read(path: Path) -> Report:
    """Read a report.json, given as the file or as its directory.

    Raises:
        UsageError: it cannot be read, or is not a report that this version knows.
    """
    file = path / NAME if path.is_dir() else path
    try:
        document = json.loads(_content(file))
        found = document.get("schema") if isinstance(document, dict) else None
        if found == SCHEMA:
            return _REPORT.validate_python(document)
        why = f"its schema is {str(found)[:60]!r} instead of {SCHEMA!r}"
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except OSError as error:
        why = error.strerror or str(error)
    except RecursionError:
        why = "it is nested too deeply"
    except ValueError as error:
        why = str(error)
    raise UsageError(
        f"{file} is not a report: {why}.",
        remedy="name a report.json that `holdfast verify` of this version has written.",
    )


def _content(file: Path) -> bytes:
    if not file.is_file():  # a pipe would block its reader
        raise ValueError("it is not a file" if file.exists() else "there is no such file")
    with file.open("rb") as opened:
        content = opened.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES} bytes")
    return content


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
