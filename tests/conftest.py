"""How tests share machines: a few processes, and each engine in one of them."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from engine_sharing import OWN, SHARED, group_of
from holdfast.processes import cleanup, imports

hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Before the first import of numpy. The matrices of the tests are so small that more threads cost
# CPU time, in which each waits for the other, and save none.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_LOGGERS = ("", "holdfast", "uvicorn", "uvicorn.access", "uvicorn.error")

_FILE = pytest.StashKey[Path]()
"""Of the last test of this process."""


# What the tests start would inherit that a signal is ignored. A shell has what it runs in the
# background ignore SIGINT, and nohup has its command ignore SIGHUP:
# https://pubs.opengroup.org/onlinepubs/9799919799/utilities/V3_chap02.html#tag_19_11
_HANDLERS = ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL))
for _number, _handler in _HANDLERS:
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


class _ByEngine(LoadScopeScheduling):  # type: ignore[misc]  # xdist's is untyped to mypy
    """Keeps together what shares an engine, and the quick tests of a file."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, name = nodeid.partition("::")
        path = Path(self.config.rootpath, file)
        engine = group_of(path, name)
        return nodeid if engine == OWN else engine or file


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector: the files of tests import vLLM."""
    with imports.uncollected():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave short files for the end: a long one would be run there by one process alone."""
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    folders = item.path.parts
    return 0 if "unit" not in folders else 1 if "verify" in folders else 2


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave it to Holdfast, in each file, how processes are started.

    vLLM says it for good in a process that sets it up, and its engines there rely on that.
    """
    if item.session.stash.get(_FILE, None) != item.path:
        item.session.stash[_FILE] = item.path
        os.environ.pop("VLLM_WORKER_MULTIPROC_METHOD", None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """End the engines of a group after its last test: idle ones cost the other tests time.

    Only where the tests of a group come one after the other.
    """
    outcome = yield
    is_by_engine = "PYTEST_XDIST_WORKER" in os.environ
    if is_by_engine and nextitem is not None and _engine_of(item) != _engine_of(nextitem):
        item.session.stash.get(SHARED, ExitStack()).close()
    return outcome


def _engine_of(item: pytest.Item) -> str | None:
    return group_of(item.path, item.name)


@pytest.fixture
def generation(tmp_path: Path) -> Iterator[Path]:
    """The directory of an engine's generation, which is removed as such a one is."""
    directory = tmp_path / "1"
    directory.mkdir()
    yield directory
    cleanup.remove(directory)


@pytest.fixture(scope="module", autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """What a file does to logging ends with it: vLLM and uvicorn change levels and filters."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [
        (one, one.level, one.propagate, one.disabled, one.handlers[:], _filters(one))
        for one in loggers
    ]
    yield
    for logger, level, propagate, is_disabled, handlers, filters in before:
        logger.setLevel(level)
        logger.propagate = propagate
        logger.disabled = is_disabled
        logger.handlers[:] = handlers
        for filtering, known in filters:
            filtering.filters[:] = known


def _filters(logger: logging.Logger) -> list[tuple[logging.Filterer, list[logging._FilterType]]]:
    return [(one, one.filters[:]) for one in (logger, *logger.handlers)]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _ByEngine:
    """Schedule by engine: xdist's own mark for it has no effect under pytest 9.2."""
    return _ByEngine(config, log)
