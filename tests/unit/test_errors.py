"""Every error has an exit code, a status and one line for people."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import errors
from holdfast.errors import ExitCode, HoldfastError, NotReadyError

MEANS_503 = re.compile(r"\bNotReadyError\(|\bSERVICE_UNAVAILABLE\b|\b503\b")
AWAY = {
    "engine/grammars/checker.py": 1,  # the client, so that nobody hears it
    "engine/grammars/pool.py": 1,  # the process that tries grammars
}


def tree(root: type[HoldfastError]) -> Iterator[type[HoldfastError]]:
    """`root` and every class below it in `holdfast.errors`."""
    yield root
    for branch in root.__subclasses__():
        if branch.__module__ == errors.__name__:
            yield from tree(branch)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.HoldfastError, 1),
        (errors.UsageError, 2),
        (errors.EngineStartError, 3),
        (errors.PluginMissingError, 3),
        (errors.ProbeFailedError, 4),
        (errors.EngineLostError, 5),
        (errors.AddressInUseError, 6),
    ],
)
def test_the_exit_code_is_that_of_the_contract(error: type[HoldfastError], code: int) -> None:
    """Section 5.1 of the design names the codes; `docker run --restart` relies on them."""
    assert error.exit_code == code


def test_only_a_clean_stop_is_success() -> None:
    """No error ends the process with 0."""
    assert all(error.exit_code != ExitCode.STOPPED for error in tree(HoldfastError))


def test_every_class_is_in_the_drawing_of_the_tree() -> None:
    """The module's docstring names them all."""
    assert all(error.__name__ in (errors.__doc__ or "") for error in tree(HoldfastError))


@pytest.mark.parametrize("root", [errors.SuspectedError, errors.QuarantinedError])
def test_no_router_retries_what_may_have_ended_an_engine(root: type[HoldfastError]) -> None:
    """Whichever way it came to be suspected; routers retry a 500, and none retries a 422."""
    assert {error.http_status for error in tree(root)} == {422}


def test_a_lack_of_host_memory_takes_no_replica_out() -> None:
    """Routers count 503 against a replica that serves shorter prompts as ever."""
    error = errors.HostMemoryError("too little")
    assert (error.http_status, error.retry_after_seconds) == (429, errors.RETRY_AFTER_SECONDS)


def test_the_engine_answers_503_only_for_what_is_away() -> None:
    """Routers take a replica out for it, so whatever is only too much for now gets 429."""
    package = Path(errors.__file__).parent
    modules = [package / "api" / "limits.py", *(package / "engine").rglob("*.py")]
    found = {
        path.relative_to(package).as_posix(): len(MEANS_503.findall(path.read_text()))
        for path in modules
    }
    assert {name: count for name, count in found.items() if count} == AWAY


def test_cause_and_remedy_are_one_line() -> None:
    """Whatever line breaks the cause has."""
    error = HoldfastError("it\nbroke\r\n  twice\u2028over.", remedy="mend it.")
    assert error.line == "it broke twice over. Remedy: mend it."
    assert len(error.line.splitlines()) == 1


@pytest.mark.parametrize("cause", ["it broke", "it broke."])
def test_the_cause_is_a_sentence_before_the_remedy(cause: str) -> None:
    """Also what another library says, which knows no full stop."""
    assert HoldfastError(cause, remedy="mend it.").line == "it broke. Remedy: mend it."


def test_without_a_remedy_the_cause_stands_alone() -> None:
    """Nothing is promised that is not there."""
    assert HoldfastError("it broke").line == "it broke"


@pytest.mark.parametrize(("given", "told"), [(-1, 1), (0, 1), (7, 7), (121, 120), (10**9, 120)])
def test_clients_are_told_to_wait_between_1_and_120_seconds(given: int, told: int) -> None:
    """OpenAI's clients give up when told more."""
    assert NotReadyError("later", retry_after_seconds=given).retry_after_seconds == told
