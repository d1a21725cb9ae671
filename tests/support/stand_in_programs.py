"""Programs of other people, as far as a test needs them: scripts that stand on PATH."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

_HEAD = """\
import json, os, signal, subprocess, sys, time
from pathlib import Path


def given(flag):
    return next(one.partition("=")[2] for one in sys.argv if one.startswith(f"{flag}="))


"""


def install(monkeypatch: pytest.MonkeyPatch, directory: Path, name: str, body: str) -> Path:
    """Put a Python program on PATH; `given("--flag")` is the value of a flag of its own."""
    place = directory / "bin"
    place.mkdir(exist_ok=True)
    path = place / name
    path.write_text(f"#!{sys.executable} -IS\n{_HEAD}{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}{os.pathsep}{os.environ['PATH']}")
    return path


def install_none(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Have no program on PATH, nor beside Python."""
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.setattr(sys, "executable", str(directory / "python"))
