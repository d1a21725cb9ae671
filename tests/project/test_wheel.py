"""What pip installs: the tests run from the tree, and users do not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
BUILD = "from setuptools.build_meta import build_wheel; print(build_wheel('dist'))"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What a wheel is built from."""
    for name in SOURCES:
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(
        ROOT / "server" / "holdfast",
        tmp_path / "server" / "holdfast",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    return tmp_path


def files_of_a_wheel(checkout: Path) -> set[str]:
    """Build a wheel as pip does, in the checkout."""
    command = [sys.executable, "-c", BUILD]
    done = subprocess.run(command, cwd=checkout, check=True, capture_output=True, text=True)
    return set(ZipFile(checkout / "dist" / done.stdout.splitlines()[-1]).namelist())


def test_a_wheel_has_every_file_of_the_package(checkout: Path) -> None:
    """With the status page, the weights and the scenes, which are not modules."""
    places = (checkout / "server" / "holdfast").rglob("*")
    ours = {str(path.relative_to(checkout / "server")) for path in places if path.is_file()}
    assert ours - files_of_a_wheel(checkout) == set()


def test_a_wheel_has_no_module_that_the_checkout_had_before(checkout: Path) -> None:
    """Else nodes whose checkouts are the same now, but were not before, differ in code."""
    module = checkout / "server" / "holdfast" / "former.py"
    module.touch()
    assert "holdfast/former.py" in files_of_a_wheel(checkout)
    module.unlink()
    assert "holdfast/former.py" not in files_of_a_wheel(checkout)
