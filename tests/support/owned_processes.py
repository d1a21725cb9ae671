"""A fork server in the test's own process, which later tests find as if there had been none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.processes import forkserver, tree


@contextmanager
def owned_processes(directory: Path) -> Iterator[None]:
    """Keep track of the children of this process while entered; later ones are spawned.

    A server starts nothing after `tree.owned`, since it ends then; a process of tests goes on.
    """
    try:
        with tree.owned(directory, {}):
            yield
    finally:
        forkserver.enable(is_allowed=False)
