"""How many connections this process may have open."""

from __future__ import annotations

import resource

from holdfast.errors import UsageError

MOST_CONNECTIONS = 16_384
"""Unless more are asked for."""
RESERVED_FILES = 1024
"""For everything that is no client: libraries, models, sockets to the engine, pipes to children,
and the connections over the limit that may still ask after the health."""
_ENOUGH_FILES = 65_536
"""What vLLM raises the limit to; where there is no hard limit at all, some programs walk it."""


def most_connections(asked: int | None) -> int:
    """How many connections may be open. The process's limit of open files is raised for them.

    Raises:
        UsageError: so many files cannot be open.
    """
    files = _raised_limit(max(_ENOUGH_FILES, (asked or 0) + RESERVED_FILES))
    room = files - min(RESERVED_FILES, files // 2)
    if asked is not None and asked > room:
        raise UsageError(
            f"--max-connections {asked}: this process may open only {files} files, enough for "
            f"{room} connections.",
            remedy="raise the hard limit (`ulimit -Hn`, `docker run --ulimit nofile=N`), or lower "
            "--max-connections.",
        )
    return min(MOST_CONNECTIONS, room) if asked is None else asked


def most_over(asked: int) -> int:
    """How many of `asked` connections over the limit fit into what is left for the rest."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    reserved = (
        RESERVED_FILES if files == resource.RLIM_INFINITY else min(RESERVED_FILES, files // 2)
    )
    return min(asked, reserved // 4)


def _raised_limit(wanted: int) -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if wanted <= soft:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
