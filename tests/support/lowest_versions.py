"""The lowest versions of our dependencies: tests run with them by `make test-lowest`.

vLLM, and what it alone requires, stay as they are.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def lowest() -> Iterator[str]:
    """Yield each dependency, pinned to the lowest version that is allowed."""
    for declared in tomllib.loads(PROJECT.read_text())["project"]["dependencies"]:
        requirement = Requirement(declared)
        (version,) = [one.version for one in requirement.specifier if one.operator == ">="]
        yield f"{requirement.name}=={version}"


def without_plugins() -> Iterator[str]:
    """Yield options that keep pytest from plugins of the dependencies that are replaced.

    pytest finds the plugins of the versions that are installed, which the lowest may not have.
    """
    for pin in lowest():
        for entry in distribution(Requirement(pin).name).entry_points.select(group="pytest11"):
            yield f"-pno:{entry.name}"


def main() -> int:
    """Run pytest, given what follows on the command line, and return its exit code."""
    with TemporaryDirectory(prefix="lowest-") as directory:
        install = ["install", "--quiet", "--only-binary=:all:", "--target", directory, *lowest()]
        subprocess.run([sys.executable, "-m", "pip", *install], check=True)
        path = [directory, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        pytest = [sys.executable, "-m", "pytest", *without_plugins(), *sys.argv[1:]]
        return subprocess.run(pytest, check=False, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
