"""What a process meets that can open no more files."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_more_files(*, at_once: int = 0) -> Iterator[None]:
    """While entered, this process can open only `at_once` files, which may be none."""
    gc.collect()  # it would close what earlier tests left open, and give a lower number back
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + at_once, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
