"""A damage of the model's arithmetic is found by the check that is meant for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.demo.files import ensure_demo_model
from holdfast.demo.switches import Damage, DemoFault, DemoSwitches
from holdfast.verify.baseline import Baseline, read_baseline
from holdfast.verify.checks import self_agreement
from holdfast.verify.checks.oracle import comparing
from holdfast.verify.checks.self_agreement.sequences import MOST_SCORED_TOKENS
from holdfast.verify.options import Options
from holdfast.verify.records import CheckStatus
from recorded_baselines import FLAGS, record_baseline
from servers import SMALL, Server, running
from verified import not_passed, recorded_at, results_at

LONG_FLAGS = (*SMALL, "--dtype=float32", "--max-model-len=4400")
SCORES = [check for check in comparing.CHECKS if check.name == "scores"]
CHUNKED = [check for check in self_agreement.CHECKS if check.name == "chunked"]
SELF = [check for check in self_agreement.CHECKS if "quick" in check.profiles]


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the sound model says."""
    directory = tmp_path_factory.mktemp("recorded")
    model = ensure_demo_model(directory, DemoSwitches(declares_need=False))
    return record_baseline(model, directory)


@pytest.fixture(scope="module")
def long_baseline(tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    """What `holdfast verify --record` measures of the sound model, up to 4,399 tokens."""
    with long_contexts(tmp_path_factory.mktemp("sound")) as server:
        return recorded_at(server.url)


@pytest.fixture(scope="module")
def nan_trigger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that makes the next long prefill of the model below NaN."""
    return tmp_path_factory.mktemp("triggers") / "row"


@pytest.fixture(scope="module")
def sound(nan_trigger: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The sound model in another process; `nan_trigger` makes it compute one row of NaNs."""
    fault = DemoFault("context", MOST_SCORED_TOKENS, "nan_row", armed_by=str(nan_trigger))
    with long_contexts(tmp_path_factory.mktemp("compared"), faults=(fault,)) as server:
        yield server


@contextmanager
def long_contexts(
    directory: Path, damage: Damage | None = None, faults: tuple[DemoFault, ...] = ()
) -> Iterator[Server]:
    """The demo with a context of 4,400 tokens, and with a damage that begins at 4,096."""
    switches = DemoSwitches(declares_need=False, damage=damage, faults=faults)
    model = ensure_demo_model(directory, switches)
    with running(directory, str(model), *LONG_FLAGS, "--served-model-name=demo") as server:
        server.until_ready()
        yield server


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "damage", ["shifted_positions", "dropped_block", "swapped_rows", "quantized_head"]
)
def test_a_damaged_model_does_not_become_ready(
    damage: Damage, baseline: Path, tmp_path: Path
) -> None:
    """It passes every other step."""
    switches = DemoSwitches(declares_need=False, damage=damage, damage_start=100)
    model = ensure_demo_model(tmp_path, switches)
    with running(tmp_path, str(model), *FLAGS, f"--verify-baseline={baseline}") as server:
        assert server.wait() == 4
        assert "the probe failed in baseline: " in server.last_line


@pytest.mark.timeout(900)
@pytest.mark.parametrize("damage", ["scaled_weight", "swapped_rows", "quantized_head"])
def test_wrong_weights_are_found_by_a_baseline(
    damage: Damage, baseline: Path, tmp_path: Path
) -> None:
    """By `holdfast verify`, of a server that became ready without one."""
    model = ensure_demo_model(tmp_path, DemoSwitches(declares_need=False, damage=damage))
    with running(tmp_path, str(model), *FLAGS) as server:
        server.until_ready()
        made = results_at(server.url, comparing.CHECKS, Options(read_baseline(baseline)))
    found = not_passed(made)
    assert found["oracle.scores"] is CheckStatus.FAILED
    assert found.keys() <= {"oracle.scores", "oracle.answers", "oracle.first_tokens"}, made


@pytest.mark.timeout(1800)
def test_positions_off_by_one_after_4096_are_found(long_baseline: Baseline, tmp_path: Path) -> None:
    """Only behind long contexts, and not by self-agreement: every code path has them."""
    with long_contexts(tmp_path, "shifted_positions") as server:
        (made,) = results_at(server.url, SCORES, Options(long_baseline)).values()
        agreement = results_at(server.url, CHUNKED)
    beyond = {number.name.partition(":")[0] for number in made.numbers if not number.is_within}
    assert beyond == {"behind long contexts"}, made.reason
    assert not_passed(agreement) == {}


@pytest.mark.timeout(1800)
def test_a_sound_model_meets_its_baseline(long_baseline: Baseline, sound: Server) -> None:
    """In another process, behind long contexts too."""
    made = results_at(sound.url, comparing.CHECKS, Options(long_baseline))
    assert not_passed(made) == {}, made


@pytest.mark.timeout(1800)
def test_a_block_that_a_chunk_loses_is_found_by_its_check(tmp_path: Path) -> None:
    """Without a baseline, and by no other check: none sends a prompt that comes in chunks."""
    with long_contexts(tmp_path, "dropped_block") as server:
        made = results_at(server.url, SELF, profile="quick")
    assert not_passed(made) == {"self.chunked": CheckStatus.FAILED}, made


@pytest.mark.timeout(1800)
def test_one_nan_row_is_found_by_its_check(sound: Server, nan_trigger: Path) -> None:
    """The engine goes on, and what comes behind the row is right."""
    nan_trigger.touch()
    made = results_at(sound.url, SELF, profile="quick")
    assert not nan_trigger.exists()
    assert not_passed(made) == {"self.prefill": CheckStatus.FAILED}, made
    assert "Out of range float values" in made["self.prefill"].reason
