"""The file of a baseline: what is written is read, and every other file is refused in one line."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from holdfast.errors import UsageError
from holdfast.verify import baseline as module
from holdfast.verify.baseline import (
    Baseline,
    FirstToken,
    Noise,
    Origin,
    RecordedSequence,
    RecordedText,
    Score,
    published_schema,
    read_baseline,
    write_baseline,
)

SCHEMA = Path(__file__).parents[3] / "docs" / "schemas" / "holdfast-baseline-1.schema.json"
TOP = ((7, -0.25), (9, -1.5))
RECORDED = Baseline(
    scores={"sums": Score(98.0, 100)},
    recorded_at="2026-11-23T11:00:00+00:00",
    origin=Origin("qwen", "0.33.0", 32768, "fp_1", "1.0", "passed"),
    noise=Noise(1e-7, 3e-6, 1e-9),
    sequences=(RecordedSequence((1, 2), (7,), (TOP, TOP)),),
    first_tokens=(FirstToken((1,), (TOP, TOP)),),
    texts=(RecordedText("Hello!", is_chat=True, token_ids=(1, 2, 3)),),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A baseline."""
    found = tmp_path / "new" / "baseline.gz"
    write_baseline(RECORDED, found)
    return found


def unpacked(path: Path) -> dict[str, Any]:
    """The document in the file."""
    return dict(json.loads(gzip.decompress(path.read_bytes())))


def refusal(path: Path) -> str:
    """What a user is told."""
    with pytest.raises(UsageError) as caught:
        read_baseline(path)
    assert "holdfast verify URL --record FILE" in caught.value.remedy
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"--against: {path} is not a baseline: ")
    return str(caught.value)


def test_what_is_written_is_read(path: Path) -> None:
    """Digit by digit, and nothing else is left in the directory."""
    assert read_baseline(path) == RECORDED
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_the_same_baseline_is_the_same_file(path: Path, tmp_path: Path) -> None:
    """It has no time but the one in it, so that a copy in a repository changes only if it does."""
    write_baseline(RECORDED, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def without_docstrings(schema: dict[str, Any]) -> dict[str, Any]:
    """Return it as pydantic 2.12 makes it; later ones describe a dataclass by its docstring."""
    return {
        **{key: value for key, value in schema.items() if key != "description"},
        "$defs": {
            name: {key: value for key, value in one.items() if key != "description"}
            for name, one in schema["$defs"].items()
        },
    }


def test_the_published_schema_is_the_one_of_the_code() -> None:
    """Write it with `json.dumps(published_schema(), indent=1)`."""
    of_code = json.loads(json.dumps(published_schema()))
    assert without_docstrings(json.loads(SCHEMA.read_text())) == without_docstrings(of_code)
    jsonschema.Draft202012Validator.check_schema(published_schema())


def test_the_file_has_the_published_shape(path: Path) -> None:
    """Also one in which nothing could be measured."""
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    validator.validate(unpacked(path))
    write_baseline(Baseline(), path)
    validator.validate(unpacked(path))


def test_a_file_that_cannot_be_written_leaves_the_old_one(path: Path) -> None:
    """As on a full disk."""
    before = path.read_bytes()
    with pytest.raises(OSError, match=r"baseline\.gz"):
        write_baseline(RECORDED, path / "below a file")
    assert path.read_bytes() == before


def test_no_file_is_refused(tmp_path: Path) -> None:
    """Neither nothing, nor a directory, nor a pipe, which would block."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "no such file" in refusal(tmp_path / "nowhere")
    assert "not a file" in refusal(tmp_path)
    assert "not a file" in refusal(pipe)


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def damaged(content: bytes) -> bytes:
    return content[:-20] + bytes(12) + content[-8:]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (gzip.decompress, "not packed with gzip"),
        (cut, "."),
        (damaged, "."),
        (lambda _: gzip.compress(b"[" * 100_000), "."),
        (lambda _: gzip.compress(b"[]"), "its schema is 'None'"),
        (lambda _: gzip.compress(b"\xff\xfe"), "."),
        (lambda _: b"", "not packed with gzip"),
    ],
    ids=["plain", "cut", "damaged", "deep", "a list", "not text", "empty"],
)
def test_another_content_is_refused(path: Path, spoil: Callable[[bytes], bytes], why: str) -> None:
    """The line says why."""
    path.write_bytes(spoil(path.read_bytes()))
    assert why in refusal(path)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"schema": "holdfast-baseline/2"}, "its schema is 'holdfast-baseline/2'"),
        ({"more": 1}, "more: "),
        ({"noise": {"median": float("nan"), "p999": 0, "divergence": 0}}, "noise.median: "),
        ({"noise": {"median": -1, "p999": 0, "divergence": 0}}, "noise.median: "),
        ({"scores": {"sums": {"value": 101, "of": 3}}}, "scores.sums.value: "),
        ({"texts": [{"text": "x", "is_chat": True, "token_ids": [2**40]}]}, "texts.0.token_ids.0"),
        ({"texts": [{"text": "x", "is_chat": 1, "token_ids": []}]}, "texts.0.is_chat: "),
        ({"sequences": [[1]]}, "sequences.0: "),
    ],
)
def test_another_shape_is_refused(path: Path, changed: dict[str, Any], why: str) -> None:
    """The line names the place."""
    path.write_bytes(gzip.compress(json.dumps({**unpacked(path), **changed}).encode()))
    assert why in refusal(path)


@pytest.mark.parametrize("name", ["_MAX_PACKED_BYTES", "_MAX_BYTES"])
def test_a_file_that_is_too_large_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Packed, and also unpacked, because no more is read than the limit."""
    monkeypatch.setattr(module, name, 100)
    assert "more than 100 bytes" in refusal(path)
