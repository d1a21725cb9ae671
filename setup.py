"""Builds the package, whose description is pyproject.toml.

setuptools keeps in build/lib what it built before: a wheel would also have the modules that were
deleted since, and nodes with the same sources would not have the same code.
"""

import shutil
from pathlib import Path

from setuptools import setup

kept = Path("build", "lib")
if kept.exists():
    shutil.rmtree(kept)
setup()
