"""What pip installs: the tests run from the tree, and users do not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE")
BUILD = "from setuptools.build_meta import build_wheel; build_wheel('dist')"


def test_a_wheel_has_every_file_of_the_package(tmp_path: Path) -> None:
    """With the status page, the weights and the scenes, which are not modules."""
    for name in SOURCES:
        shutil.copy(ROOT / name, tmp_path)
    package = tmp_path / "server" / "holdfast"
    shutil.copytree(
        ROOT / "server" / "holdfast", package, ignore=shutil.ignore_patterns("__pycache__")
    )
    ours = {str(path.relative_to(package.parent)) for path in package.rglob("*") if path.is_file()}
    subprocess.run([sys.executable, "-c", BUILD], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert ours - set(ZipFile(wheel).namelist()) == set()
