"""How did a document change? A JSON merge patch, RFC 7396 (https://www.rfc-editor.org/rfc/rfc7396).

In these documents an unknown member is absent, since in a patch null deletes a member.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

StatusDocument = Mapping[str, Any]


def difference(old: StatusDocument, new: StatusDocument) -> dict[str, Any]:
    """Return the patch that makes `new` of `old`; empty if they are equal."""
    patch: dict[str, Any] = {name: None for name in old if name not in new}
    for name, value in new.items():
        # Most members are the same object as before, which costs no comparison.
        before = old.get(name)
        if before is value:
            continue
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            if inner := difference(before, value):
                patch[name] = inner
        elif before != value:
            patch[name] = value
    return patch


def merged(document: StatusDocument, patch: StatusDocument) -> dict[str, Any]:
    """Return a document with a patch applied; neither is changed."""
    result = {name: value for name, value in document.items() if patch.get(name, "") is not None}
    for name, value in patch.items():
        if isinstance(value, Mapping):
            before = result.get(name)
            result[name] = merged(before if isinstance(before, Mapping) else {}, value)
        elif value is not None:
            result[name] = value
    return result
