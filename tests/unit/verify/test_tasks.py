"""The file of the user's own tasks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.errors import UsageError
from holdfast.verify.tasks import Task, digest_of, read_tasks


def test_each_line_is_a_task(tmp_path: Path) -> None:
    """Empty lines and further fields are left aside; a task keeps the number of its line."""
    path = tmp_path / "tasks.jsonl"
    path.write_text(
        '{"prompt": "1 + 1?", "expected": "2"}\n\n{"prompt": "Ä?", "expected": "ä", "note": "x"}\n',
        encoding="utf-8",
    )
    assert read_tasks(path) == (Task(1, "1 + 1?", "2"), Task(3, "Ä?", "ä"))


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    """JSON allows the other separators of Unicode within a string, and some editors write a BOM."""
    path = tmp_path / "tasks.jsonl"
    first = '{"prompt": "a\u2028b\u0085c", "expected": "d"}'
    path.write_bytes(f'\ufeff{first}\r\n{{"prompt": "e", "expected": "f"}}\r\n'.encode())
    assert read_tasks(path) == (Task(1, "a\u2028b\u0085c", "d"), Task(2, "e", "f"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "contains no task"),
        (b"\n\n", "contains no task"),
        (b'{"prompt": "a", "expected": "b"}\n[]', "line 2 of"),
        (b"[" * 100_000, "line 1 of"),
        (b'{"prompt": "a"}', "line 1 of"),
        (b'{"prompt": "a", "expected": " "}', "line 1 of"),
        (b'{"prompt": 1, "expected": "b"}', "line 1 of"),
        (b"\xff", "cannot be read"),
    ],
    ids=["empty", "blank", "list", "deep", "no answer", "blank answer", "number", "bytes"],
)
def test_a_file_that_is_wrong_is_bad_usage(tmp_path: Path, content: bytes, said: str) -> None:
    """The error names the flag, and the line where there is one."""
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="--tasks: .*" + said) as caught:
        read_tasks(path)
    assert caught.value.remedy


def test_a_file_that_is_missing_is_bad_usage(tmp_path: Path) -> None:
    """As one that may not be read."""
    with pytest.raises(UsageError, match="cannot be read"):
        read_tasks(tmp_path / "none")


def test_the_same_tasks_are_the_same_in_any_order() -> None:
    """And on any line; another text makes others of them."""
    first, second = Task(1, "Pi?", "3.14"), Task(2, "e?", "2.71")
    digest = digest_of([first, second])
    assert digest == digest_of([replace(second, line=1), replace(first, line=7)])
    assert digest != digest_of([first, replace(second, expected="2.72")])
