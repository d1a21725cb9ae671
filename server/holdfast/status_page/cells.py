"""Values of a document as text of a terminal. Whatever they are, nothing is raised."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TypeGuard

from rich.table import Table
from rich.text import Text

from holdfast.status_page.patch import StatusDocument

BAR_CELLS = 20
_LARGEST = 1e18
"""A number beyond this is not one of a server."""
_MAX_TEXT_CHARACTERS = 1000


def new_table(*names: str) -> Table:
    """Return a table without lines, with these columns."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in names:
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    return table


def add_row(table: Table, *cells: str | Text) -> None:
    """Add a row; rich would look for markup in a plain string."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def map_of(document: StatusDocument, name: str) -> StatusDocument:
    """Return a member that is a map; an empty one in place of anything else."""
    found = document.get(name)
    return found if is_mapping(found) else {}


def is_mapping(value: object) -> TypeGuard[StatusDocument]:
    """Whether a value is a map."""
    return isinstance(value, Mapping)


def in_order(document: StatusDocument, name: str) -> list[tuple[str, StatusDocument]]:
    """Return the members of a map in the order of the numbers in their names."""
    members = map_of(document, name).items()
    entries = [(key, entry) for key, entry in members if is_mapping(entry)]
    return sorted(entries, key=lambda member: _place(member[0]))


def _place(name: str) -> tuple[tuple[int, str], ...]:
    parts = name.split("/")
    return tuple((int(part), "") if _is_number(part) else (0, part) for part in parts)


def _is_number(text: str) -> bool:
    """Whether a text is a number of a place; Python converts no number of any length."""
    return text.isdecimal() and len(text) <= 18


def plain(value: object) -> str:
    """Return a value without what a terminal would interpret; empty if it is unknown."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        text = "" if finite(value) is None else str(value)
    else:
        text = "" if value is None else str(value)[:_MAX_TEXT_CHARACTERS]
    return "".join(char if char.isprintable() else " " for char in text)


def finite(value: object) -> float | None:
    """Return a number that a server may have sent; None for everything else."""
    if not isinstance(value, int | float) or not -_LARGEST < value < _LARGEST:
        return None
    return value


def sum_of(values: StatusDocument) -> float:
    """Return the sum of those that are numbers."""
    return sum(number for number in map(finite, values.values()) if number is not None)


def number_of(value: object) -> str:
    """Return a number in groups of three digits; ? if it is unknown."""
    number = finite(value)
    return "?" if number is None else f"{number:,}"


def decimal(value: object) -> str:
    """Return a number with one decimal; empty if it is unknown."""
    number = finite(value)
    return "" if number is None else f"{number:.1f}"


def percent(value: object) -> str:
    """Return a share as a percentage; empty if it is unknown."""
    number = finite(value)
    return "" if number is None else f"{number:.0%}"


def size_of(value: object) -> str:
    """Return a size in the largest IEC unit that leaves a number of at least 1."""
    size = finite(value)
    if size is None:
        return "?"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def bar(part: object, whole: object) -> Text:
    """Return a part of a whole as a bar; empty if one of them is unknown."""
    done, end = finite(part), finite(whole)
    if done is None or end is None or end <= 0:
        return Text("")
    filled = round(BAR_CELLS * min(1.0, max(0.0, done / end)))
    return Text.assemble(("#" * filled, "green"), ("." * (BAR_CELLS - filled), "dim"))


def age(time: object, now: float) -> str:
    """Return how long ago a time was; empty if it is unknown."""
    moment = _unix_seconds(time)
    return "" if moment is None else _duration(max(0.0, now - moment))


def age_until(time: object, now: float) -> str:
    """Return how far away a time is; empty if it is unknown or has come."""
    moment = _unix_seconds(time)
    return "" if moment is None or moment <= now else _duration(moment - now)


def _unix_seconds(time: object) -> float | None:
    try:
        return datetime.fromisoformat(str(time)).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def _duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
