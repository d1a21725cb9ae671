"""Refuses variables that were meant for this server by their names, and that it does not read."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from difflib import get_close_matches

from holdfast.errors import UsageError
from holdfast.settings import flags
from holdfast.settings.listen_flags import add_listener_flags
from holdfast.settings.node_flags import add_node_flags

logger = logging.getLogger(__name__)

OUR_PREFIX = "HOLDFAST_"
IMAGE_VARIABLE = "HOLDFAST_IMAGE"
"""The name of the container image: the Dockerfile sets it, and the chart with its digest."""
NOT_THE_KEY = "HOLDFAST_API_KEY"
"""Set in place of vLLM's variable, it would leave the server open."""
_THE_KEY = "VLLM_API_KEY"
_OTHERS = {
    IMAGE_VARIABLE,
    "HOLDFAST_HEAD_DRAIN_TIMEOUT",
    "HOLDFAST_EXIT_CODES",
    "HOLDFAST_OPERATORS_TMPDIR",
    "HOLDFAST_PARENT_PID",
    "HOLDFAST_WORKSPACE_SPEC",
}
"""Those of no flag of `serve`: the image's, a follower's, and what our processes hand on."""
_OF_THE_GPU_CHECK = "HOLDFAST_GPU_CHECK_"
_OF_A_SERVICE = re.compile(
    r"\w*_SERVICE_(?:HOST|PORT(?:_\w+)?)|\w*_PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?"
)
"""What Kubernetes sets for each Service of the namespace, besides an address in `..._PORT`."""
_ENDS_OF_KEYS = ("ADMIN", "KEY", "KEYFILE", "KEYS", "PASSWORD", "SECRET", "TOKEN")
"""So a word ends in the name of what guards the server; without effect, it would be open."""
_OF_FILES = (
    *("_DIR", "_DIRECTORY", "_FILE", "_FILENAME", "_FILES", "_FILE_NAME"),
    *("_KEYFILE", "_LOCATION", "_PATH"),
)
_OF_ADDRESSES = ("_URL", "_EMAIL", "_HOST", "_PORT", "_NAME")
"""How names end that say where something is, not what guards it."""
_LIKENESS = 0.9
_LIKENESS_OF_KEYS = 0.82
_LIKENESS_OF_VLLMS = 0.78
_LIKENESS_OF_UNKNOWN = 0.75
"""For advice about a name that may have another purpose."""


def is_read(name: str) -> bool:
    """Return whether we read the variable of this name, which begins as ours do."""
    ours = {flag.variable for flag in flags()}
    return name in ours or name in _OTHERS or name.startswith(_OF_THE_GPU_CHECK)


def remedy_of(name: str) -> str:
    """Return what to do instead of setting a variable; empty if it may have another purpose.

    vLLM's flags are known to vLLM's parser alone: `check_rest` looks at those.
    """
    if not name.startswith(OUR_PREFIX):
        return _remedy_of_vllms(name)
    if is_read(name):
        return ""
    flag = _as_flag(name)
    if flag in _listener_flags() and name != NOT_THE_KEY:
        return f"use {flag}."
    if not _is_of_keys(name):
        meant = _likely(flag, _LIKENESS)
        return f"set {meant} instead." if meant else ""
    if meant := _likely(flag, _LIKENESS_OF_KEYS, lambda other: _fits(name, other)):
        return f"set {meant} instead."
    return f"{_keys_for(name)}, or unset it."


def refuse_mistyped_variables(environment: Mapping[str, str]) -> None:
    """Check the names of the variables; an empty one is not set.

    Raises:
        UsageError: one has no effect, although it was meant for this server.
    """
    for name in _set_by_somebody(environment):
        if remedy := remedy_of(name):
            raise _without_effect(name, remedy)


def check_rest(environment: Mapping[str, str], known_flags: Collection[str]) -> None:
    """Check the variables again, with all flags that vLLM's parser knows; warn of the others.

    Raises:
        UsageError: one is named like a flag without a variable.
    """
    for name in _set_by_somebody(environment):
        if not name.startswith(OUR_PREFIX) or is_read(name):
            continue
        flag = _as_flag(name)
        if flag in known_flags:
            raise _without_effect(name, f"use {flag}.")
        meant = _likely(flag, _LIKENESS_OF_UNKNOWN)
        advice = f"; set {meant} if that was meant" if meant else ""
        logger.warning("the variable %s has no effect: no setting has this name%s", name, advice)


def _set_by_somebody(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the names of the variables that are not empty and that no cluster sets."""
    for name, value in environment.items():
        is_address = name.endswith("_PORT") and "://" in value
        if value and not is_address and not _OF_A_SERVICE.fullmatch(name):
            yield name


def _without_effect(name: str, remedy: str) -> UsageError:
    return UsageError(f"the variable {name} has no effect.", remedy=remedy)


def _likely(flag: str, likeness: float, fits: Callable[[str], bool] = lambda _: True) -> str:
    """Return the variables of the flags that are most similar to this one, of those that fit."""
    variables = _variables()
    fitting = filter(fits, variables)
    return " or ".join(variables[one] for one in get_close_matches(flag, fitting, 3, likeness))


def _variables() -> dict[str, str]:
    """Return the variable of each flag that has one."""
    return {one.name: one.variable for one in flags()} | {"--api-key": _THE_KEY}


def _is_of_keys(name: str) -> bool:
    """Whether a name is that of something that guards the server."""
    is_of_address = name.endswith(_OF_ADDRESSES) and not _is_of_file(name)
    return not is_of_address and any(word.endswith(_ENDS_OF_KEYS) for word in name.split("_"))


def _is_key(flag: str) -> bool:
    return any(part in flag for part in ("api-key", "key-file", "keyfile"))


def _fits(name: str, flag: str) -> bool:
    """Whether a value that was meant for one may be given to the other without harm.

    No path may become a key, and no secret of the operator's or of TLS that of all clients.
    """
    if ("ADMIN" in name and "admin" not in flag) or (_is_of_file(name) and "file" not in flag):
        return False
    return _is_of_tls(name) == ("ssl" in flag)


def _keys_for(name: str) -> str:
    """Return what to set instead of an unknown name, if it was to guard the server."""
    known = {option: f"use {option}" for option in _listener_flags()}
    known |= {option: f"set {variable}" for option, variable in _variables().items()}
    keys = [one for one in known if _is_key(one) and _fits(name, one)]
    if likely := get_close_matches(_as_flag(name), keys, 2, _LIKENESS_OF_UNKNOWN):
        return f"{' or '.join(known[one] for one in likely)} if that was meant"
    if _is_of_tls(name):
        return "use --ssl-keyfile if it is the key of TLS"
    end = "_FILE" if _is_of_file(name) else ""
    settings = [f"HOLDFAST_API_KEY{end}" if end else _THE_KEY, f"HOLDFAST_ADMIN_API_KEY{end}"]
    meant = settings[1:] if "ADMIN" in name else settings
    return f"set {' or '.join(meant)} if it is to guard this server"


def _is_of_file(name: str) -> bool:
    return name.endswith(_OF_FILES)


def _is_of_tls(name: str) -> bool:
    return "SSL" in name or "TLS" in name


def _remedy_of_vllms(name: str) -> str:
    """Return what to set instead of a name that is almost the one of vLLM's key."""
    if name == _THE_KEY or not name.startswith("VLLM_") or not _is_of_keys(name):
        return ""
    if not get_close_matches(name, [_THE_KEY], 1, _LIKENESS_OF_VLLMS):
        return ""
    keys = "HOLDFAST_ADMIN_API_KEY" if "ADMIN" in name else f"{_THE_KEY} or HOLDFAST_API_KEY_FILE"
    return f"set {keys} instead."


def _listener_flags() -> set[str]:
    """Return the flags of vLLM that our own parser reads, and that have no variable."""
    parser = argparse.ArgumentParser(add_help=False)
    add_listener_flags(parser)
    add_node_flags(parser)
    return {option for action in parser._actions for option in action.option_strings}  # noqa: SLF001 - argparse has no list of its flags


def _as_flag(variable: str) -> str:
    return "--" + variable.removeprefix(OUR_PREFIX).lower().replace("_", "-")
