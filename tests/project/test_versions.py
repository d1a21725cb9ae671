"""The versions that Holdfast stands on are the same wherever they are written."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from gpu_check.__main__ import VLLM
from holdfast.versions import SUPPORTED_VLLM, is_supported_vllm, vllm_version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = " ".join((ROOT / "README.md").read_text().split())


def test_the_extra_asks_for_what_the_doctor_accepts() -> None:
    """From the first supported release of vLLM to the last one."""
    (first, last) = SUPPORTED_VLLM
    (wanted,) = PROJECT["optional-dependencies"]["cuda"]
    assert wanted == f"vllm>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"
    assert f"vLLM {first[0]}.{first[1]} to {last[0]}.{last[1]}" in README


def test_the_gpu_check_fetches_what_the_extra_asks_for() -> None:
    """Its one file of vLLM is of a release that Holdfast takes."""
    assert PROJECT["optional-dependencies"]["cuda"] == [VLLM]


def test_users_install_the_vllm_that_the_tests_run() -> None:
    """The extra alone takes the newest supported one, and only its interfaces were checked."""
    tested = ".".join(vllm_version().split(".")[:2])
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "gpu_check/lacks.py")
    lines = [line for page in pages for line in page.read_text().splitlines()]
    commands = [line for line in lines if "pip install" in line and "'.[cuda]'" in line]
    assert commands
    assert [line for line in commands if f"'.[cuda]' 'vllm=={tested}.*'" not in line] == []


def test_the_tests_run_on_a_supported_vllm() -> None:
    """On the pinned one."""
    assert is_supported_vllm(vllm_version())


def test_the_supported_pythons_are_those_of_the_package() -> None:
    """As people read them, and as pip does."""
    found = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"])
    assert found is not None
    assert f"Python 3.{found[1]} to 3.{int(found[2]) - 1}" in README
