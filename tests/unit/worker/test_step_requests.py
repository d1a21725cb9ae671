"""What a rank was running stays readable when it is dead, whole or not at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.records import Suspect
from holdfast.worker.step_requests import StepRequests, read_reached_tokens, read_suspects
from scheduled_steps import names, step

CRASH = """
import ctypes, sys
from pathlib import Path
from types import SimpleNamespace
from holdfast.worker.step_requests import StepRequests
requests = StepRequests(Path(sys.argv[1]), engine=0, rank=0, max_requests=1, max_steps=1)
cached = SimpleNamespace(req_ids=["guilty"], num_computed_tokens=[7], num_output_tokens=[2])
requests.began(SimpleNamespace(
    scheduled_new_reqs=[], scheduled_cached_reqs=cached, num_scheduled_tokens={"guilty": 1}))
ctypes.string_at(0)
"""


def requests_of(
    directory: Path, engine: int = 0, rank: int = 0, most: int = 8, steps: int = 1
) -> StepRequests:
    """The writer of one rank."""
    return StepRequests(directory, engine=engine, rank=rank, max_requests=most, max_steps=steps)


def test_the_requests_of_a_step_are_read_from_what_the_scheduler_said(tmp_path: Path) -> None:
    """A new one, one amid its prompt and one that decodes: how far each gets in this step."""
    cached = SimpleNamespace(
        req_ids=["chunk", "decode"], num_computed_tokens=[64, 100], num_output_tokens=[0, 5]
    )
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="new", num_computed_tokens=16)],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={"decode": 1, "chunk": 64, "new": 1},
    )
    requests_of(tmp_path).began(output)
    assert set(read_suspects(tmp_path)[0]) == {
        Suspect("new", 17, is_prefill=True),
        Suspect("chunk", 128, is_prefill=True),
        Suspect("decode", 101, is_prefill=False),
    }


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        (0, [("last", True), ("before", True), ("first", True)]),
        (1, [("last", True), ("before", True), ("first", False)]),
        (2, [("last", True), ("before", False), ("first", False)]),
        (3, []),
    ],
)
def test_every_step_in_flight_counts(
    tmp_path: Path, ended: int, expected: list[tuple[str, bool]]
) -> None:
    """vLLM has three over a pipeline of two stages; those that ended may have left a kernel."""
    requests = requests_of(tmp_path, steps=3)
    for name in ("first", "before", "last"):
        requests.began(step(name))
    requests.ended(ended)
    assert names(tmp_path) == expected


def test_older_steps_do_not_count(tmp_path: Path) -> None:
    """Of one at a time the step before does, which has ended."""
    requests = requests_of(tmp_path)
    for number, name in enumerate(("oldest", "before", "last")):
        requests.ended(number)
        requests.began(step(name))
    assert names(tmp_path) == [("last", True), ("before", False)]


def test_a_request_of_several_steps_is_named_once(tmp_path: Path) -> None:
    """With the last of them, which got furthest."""
    requests = requests_of(tmp_path)
    requests.began(step("both"))
    output = step("both")
    output.scheduled_cached_reqs.num_computed_tokens = [11]
    requests.ended(1)
    requests.began(output)
    assert read_suspects(tmp_path)[0] == (Suspect("both", 12, is_prefill=False),)


def test_a_step_runs_until_it_has_ended_for_every_rank(tmp_path: Path) -> None:
    """The first stage of a pipeline is ahead, and is done with a step when it has launched it."""
    first, last = (requests_of(tmp_path, rank=rank, steps=3) for rank in (0, 1))
    for number, name in enumerate(("ended", "one", "two", "three"), start=1):
        first.began(step(name))
        first.ended(number)
    last.began(step("ended"))
    last.ended(1)
    last.began(step("one"))
    assert names(tmp_path) == [("three", True), ("two", True), ("one", True), ("ended", False)]


def test_a_step_that_the_last_rank_has_not_begun_runs(tmp_path: Path) -> None:
    """Nobody is between two steps while the first rank has begun another."""
    first, last = (requests_of(tmp_path, rank=rank) for rank in (0, 1))
    for rank in (first, last):
        rank.began(step("done"))
        rank.ended(1)
    first.began(step("next"))
    first.ended(2)
    assert names(tmp_path) == [("next", True), ("done", False)]


def test_between_two_steps_nobody_is_named(tmp_path: Path) -> None:
    """Nor before the first."""
    requests = requests_of(tmp_path)
    assert not read_suspects(tmp_path)
    requests.began(step("done"))
    requests.ended(1)
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
    ("output", "error"),
    [
        (step(*(f"{number:0512}" for number in range(8))), ValueError),
        (SimpleNamespace(), AttributeError),
        (SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=None), AttributeError),
    ],
)
def test_of_a_step_that_cannot_be_written_nothing_is_believed(
    tmp_path: Path, output: SimpleNamespace, error: type[Exception]
) -> None:
    """The requests of the step before are not taken for its own."""
    requests = requests_of(tmp_path)
    requests.began(step("before"))
    with pytest.raises(error):
        requests.began(output)
    assert not read_suspects(tmp_path)


def test_nothing_is_believed_while_one_of_the_steps_in_flight_is_unknown(tmp_path: Path) -> None:
    """A step that has ended is not such a step."""
    requests = requests_of(tmp_path, steps=3)
    with pytest.raises(AttributeError):
        requests.began(SimpleNamespace())
    requests.began(step("last"))
    assert not read_suspects(tmp_path)
    requests.ended(1)
    assert names(tmp_path) == [("last", True)]


def test_a_file_that_is_cut_short_names_nobody(tmp_path: Path) -> None:
    """A disk may have lost the rest of it."""
    requests = requests_of(tmp_path, most=1)
    requests.began(step("a"))
    requests.began(step("b"))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    # What is kept last, in the second half of the file, are four numbers and a name.
    for size in range(len(whole) - 256 + 4 * 8 + 1):
        path.write_bytes(whole[:size])
        assert not read_suspects(tmp_path)
    path.write_bytes(whole)
    assert names(tmp_path) == [("b", True), ("a", True)]


def test_the_tokens_that_requests_have_reached_are_those_of_the_newest_step(tmp_path: Path) -> None:
    """Also between two steps, from any rank of each engine."""
    assert read_reached_tokens(tmp_path) == {}
    ranks = [requests_of(tmp_path, engine, rank) for engine in (0, 1) for rank in (0, 1)]
    for rank in ranks:
        rank.began(step("gone"))
        rank.ended(1)
    for rank in ranks[:2]:
        rank.began(step("here"))
        rank.ended(2)
    assert set(read_reached_tokens(tmp_path)) == {"here", "gone"}
    for rank in ranks[2:]:
        rank.began(step("there"))
    assert set(read_reached_tokens(tmp_path)) == {"here", "there"}


def test_a_running_step_has_computed_nothing_yet(tmp_path: Path) -> None:
    """A prompt that one step processes would be whole from its beginning."""
    requests = requests_of(tmp_path)
    requests.began(step("long"))
    assert read_reached_tokens(tmp_path) == {"long": 10}
    requests.ended(1)
    assert read_reached_tokens(tmp_path) == {"long": 11}


def test_a_step_that_is_not_written_yet_is_not_read(tmp_path: Path) -> None:
    """The one before it is; a file of something else is none."""
    requests = requests_of(tmp_path)
    requests.began(step("whole"))
    with pytest.raises(AttributeError):
        requests.began(None)
    (tmp_path / "engine-x-rank-0.step").write_bytes(b"")
    (tmp_path / "engine-9-rank-0.step").write_bytes(b"short")
    assert set(read_reached_tokens(tmp_path)) == {"whole"}
