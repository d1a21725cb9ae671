"""Tests that are marked with one engine run where it is, and need not be imported to be known."""

from __future__ import annotations

from pathlib import Path

from engine_sharing import OWN, group_of

FILE = """
import pytest
pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("demo")]
def test_of_the_file(): ...
@pytest.mark.shares_engine("learned")
def test_of_another(): ...
@pytest.mark.own_engines
def test_alone(): ...
"""


def test_a_mark_of_a_test_comes_before_that_of_its_file(tmp_path: Path) -> None:
    """And a file without a mark has its own engine."""
    folder = tmp_path / "engine"
    folder.mkdir()
    marked, plain = folder / "test_marked.py", folder / "test_plain.py"
    marked.write_text(FILE)
    plain.write_text("pytestmark = 1\n")
    assert group_of(marked, "test_of_the_file") == "demo"
    assert group_of(marked, "test_of_another") == "learned"
    assert group_of(marked, "test_alone") == OWN
    assert group_of(plain, "test_any") is None


def test_files_of_other_folders_share_no_engine(tmp_path: Path) -> None:
    """They are not read: the marks would have no effect."""
    marked = tmp_path / "test_marked.py"
    marked.write_text(FILE)
    assert group_of(marked, "test_of_another") is None
