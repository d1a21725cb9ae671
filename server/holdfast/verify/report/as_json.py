"""report.json: everything, for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from holdfast.verify.records import Report, Status


def document(report: Report) -> dict[str, Any]:
    """The report as JSON has it: a number that is not finite becomes a string."""
    counts = {status.value: report.count(status) for status in Status}
    whole = asdict(report)
    schema = whole.pop("schema")
    return {"schema": schema, **_finite(whole), "counts": counts}


def rendered(report: Report) -> str:
    """The file."""
    return json.dumps(document(report), indent=1, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
