"""What a rank was running stays readable when it is dead, whole or not at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.records import Suspect
from holdfast.workspace.suspects import StepRequests, read_suspects

CRASH = """
import ctypes, sys
from pathlib import Path
from types import SimpleNamespace
from holdfast.workspace.suspects import StepRequests
requests = StepRequests(Path(sys.argv[1]), engine=0, rank=0, most_requests=1)
cached = SimpleNamespace(req_ids=["guilty"], num_computed_tokens=[7], num_output_tokens=[2])
requests.began(SimpleNamespace(
    scheduled_new_reqs=[], scheduled_cached_reqs=cached, num_scheduled_tokens={"guilty": 1}))
ctypes.string_at(0)
"""


def step(*names: str) -> SimpleNamespace:
    """As vLLM's scheduler describes it: requests in the middle of their answers."""
    count = len(names)
    cached = SimpleNamespace(
        req_ids=list(names), num_computed_tokens=[10] * count, num_output_tokens=[3] * count
    )
    return SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=dict.fromkeys(names, 1),
    )


def requests_of(directory: Path, engine: int = 0, rank: int = 0, most: int = 8) -> StepRequests:
    """The writer of one rank."""
    return StepRequests(directory, engine=engine, rank=rank, most_requests=most)


def names(directory: Path, engine: int = 0) -> list[tuple[str, bool]]:
    """Who may have ended an engine, and whether it was in the last step."""
    found = read_suspects(directory).get(engine, ())
    return [(suspect.request_id, suspect.is_in_last_step) for suspect in found]


def test_the_requests_of_a_step_are_read_from_what_the_scheduler_said(tmp_path: Path) -> None:
    """A new one, one amid its prompt and one that decodes: how far each gets in this step."""
    cached = SimpleNamespace(
        req_ids=["chunk", "decode"], num_computed_tokens=[64, 100], num_output_tokens=[0, 5]
    )
    said = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="new", num_computed_tokens=16)],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={"decode": 1, "chunk": 64, "new": 1},
    )
    requests_of(tmp_path).began(said)
    assert set(read_suspects(tmp_path)[0]) == {
        Suspect("new", 17, is_prefill=True),
        Suspect("chunk", 128, is_prefill=True),
        Suspect("decode", 101, is_prefill=False),
    }


def test_the_step_before_counts_too(tmp_path: Path) -> None:
    """With asynchronous scheduling its kernels may still have run; older ones do not count."""
    requests = requests_of(tmp_path)
    for name in ("oldest", "before", "last"):
        requests.began(step(name))
    assert names(tmp_path) == [("last", True), ("before", False)]


def test_between_two_steps_nobody_is_named(tmp_path: Path) -> None:
    """Nor before the first."""
    requests = requests_of(tmp_path)
    assert not read_suspects(tmp_path)
    requests.began(step("done"))
    requests.ended()
    assert not read_suspects(tmp_path)


def test_each_engine_has_its_own(tmp_path: Path) -> None:
    """And the ranks of one say the same, once."""
    for rank in (0, 1):
        requests_of(tmp_path, engine=0, rank=rank).began(step("a"))
    requests_of(tmp_path, engine=1).began(step("b"))
    assert names(tmp_path, 0) == [("a", True)]
    assert names(tmp_path, 1) == [("b", True)]


def test_a_process_that_crashes_has_named_its_requests(tmp_path: Path) -> None:
    """It has no moment left in which it could."""
    ended = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path)], check=False, timeout=60)
    assert ended.returncode == -11
    assert read_suspects(tmp_path)[0] == (Suspect("guilty", 8, is_prefill=False),)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (step(*(f"{number:0512}" for number in range(8))), ValueError),
        (SimpleNamespace(), AttributeError),
        (SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=None), AttributeError),
    ],
)
def test_of_a_step_that_cannot_be_written_nothing_is_believed(
    tmp_path: Path, said: SimpleNamespace, error: type[Exception]
) -> None:
    """The requests of the step before are not taken for its own."""
    requests = requests_of(tmp_path)
    requests.began(step("before"))
    with pytest.raises(error):
        requests.began(said)
    assert not read_suspects(tmp_path)


def test_a_file_that_is_cut_short_names_nobody(tmp_path: Path) -> None:
    """A disk may have lost the rest of it."""
    requests_of(tmp_path, most=2).began(step("a", "b"))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for size in range(len(whole) - 2 * 256 + 7 * 8 + 3):
        path.write_bytes(whole[:size])
        assert not read_suspects(tmp_path)
