"""vLLM's variables: which of them it cannot read, and what an empty one means."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from holdfast.errors import UsageError

_PREFIX = "VLLM_"
_MEANT_EMPTY = "VLLM_PLUGINS"
"""Empty it leaves out every plugin, ours too, which is refused elsewhere."""


def is_on(name: str, environment: Mapping[str, str]) -> bool:
    """Whether a variable that is 0 or 1 switches something on."""
    return environment.get(name, "0") not in {"", "0"}


def forget_empty(environment: MutableMapping[str, str]) -> None:
    """Take out vLLM's variables that are empty, as Compose hands on what is not set.

    vLLM reads a number from some, and from none of them anything else than if it were not set.
    """
    for name in list(environment):
        if name.startswith(_PREFIX) and name != _MEANT_EMPTY and not environment[name]:
            del environment[name]


def check(environment: Mapping[str, str]) -> None:
    """Have vLLM read each of its variables that is set. Imports vLLM's list of them.

    Raises:
        UsageError: it cannot read one.
    """
    from vllm import envs  # noqa: PLC0415 - imports torch

    for name, read in envs.environment_variables.items():
        if name not in environment:
            continue
        try:
            read()
        except (ValueError, TypeError, KeyError, OSError) as error:
            raise UsageError(
                f"the variable {name} has an invalid value: {error}.",
                remedy="correct it, or unset it.",
            ) from error
