"""How tests share machines: a few processes, and each engine in one of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from holdfast.processes import cleanup

hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

_FILE = pytest.StashKey[Path]()
"""Of the last test of this process."""
_SHARED_ENGINE = {
    "test_deployment.py": "demo",
    "test_grammars.py": "demo",
    "test_memory_report.py": "demo",
    "test_metrics_page.py": "demo",
    "test_openai.py": "demo",
    "test_ranks.py": "demo",
    "test_schema.py": "demo",
    "test_states.py": "demo",
    "test_learned_restart.py": "learned",
    "test_requests_after_ready.py": "learned",
    "test_lock_bug.py": "learned",
    "test_never_proves_again_in_the_same_engine_but_not_what_the_journal_forbids": "learned",
}
"""What uses one engine, which is started once in the process that runs all of it."""
_OWN_ENGINES = frozenset({"test_foreign_models.py", "test_probe_steps.py"})
"""Where each test has an engine of its own. In any other file the tests share theirs."""


class _ByEngine(LoadScopeScheduling):  # type: ignore[misc]  # xdist's is untyped to mypy
    """Keeps together what shares an engine, and the quick tests of a file."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, name = nodeid.partition("::")
        path = PurePosixPath(file)
        if path.parent.name == "engine":
            own = nodeid if path.name in _OWN_ENGINES else file
            return _SHARED_ENGINE.get(path.name) or _SHARED_ENGINE.get(name, own)
        return file


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave it to Holdfast, in each file, how processes are started.

    vLLM says it for good in a process that sets it up, and its engines there rely on that.
    """
    if item.session.stash.get(_FILE, None) != item.path:
        item.session.stash[_FILE] = item.path
        os.environ.pop("VLLM_WORKER_MULTIPROC_METHOD", None)


@pytest.fixture
def generation(tmp_path: Path) -> Iterator[Path]:
    """The directory of an engine's generation, which is removed as such a one is."""
    directory = tmp_path / "1"
    directory.mkdir()
    yield directory
    cleanup.remove(directory)


@pytest.fixture(scope="module", autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """What a file does to logging ends with it: vLLM raises levels and leaves filters behind."""
    loggers = [logging.getLogger(name) for name in ("", "holdfast")]
    before = [
        (one, one.level, one.propagate, one.handlers[:], [h.filters[:] for h in one.handlers])
        for one in loggers
    ]
    yield
    for logger, level, propagate, handlers, filters in before:
        logger.setLevel(level)
        logger.propagate = propagate
        logger.handlers[:] = handlers
        for handler, known in zip(handlers, filters, strict=True):
            handler.filters[:] = known


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _ByEngine:
    """Schedule by engine: xdist's own mark for it has no effect under pytest 9.2."""
    return _ByEngine(config, log)
