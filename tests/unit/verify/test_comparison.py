"""What counts as a change from one report to another."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from holdfast.configuration_record import ModelFile
from holdfast.verify.comparison import Change, ComparedReports, compare
from holdfast.verify.records import CheckStatus, Number, at_most
from sample_reports import SERVED, SERVER, check, report


def configured(**differences: Any) -> ComparedReports:
    """What changed for a server whose configuration has some differences."""
    served = replace(SERVED, **differences)
    one = check("chat")
    return compare(report(one), report(one, server=replace(SERVER, configuration=served)))


def test_a_report_is_the_same_as_itself() -> None:
    """NaN too, which equals nothing; all that was compared is counted."""
    one = report(check("chat", CheckStatus.PASSED, Number("rows", math.nan), Number("n", 2)))
    found = compare(one, one)
    assert (found.statuses, found.numbers, found.configuration) == ((), (), ())
    assert (found.same_statuses, found.same_numbers) == (1, 2)
    assert found.same_settings > 10


def test_statuses_come_worst_first_with_their_reasons() -> None:
    """A check that only one of the reports has is a change, too."""
    before = report(
        check("a"), check("b", CheckStatus.FAILED, why="late"), check("c"), check("old")
    )
    after = report(check("a", CheckStatus.FAILED, why="rude"), check("b"), check("c"), check("new"))
    assert compare(before, after).statuses == (
        Change("wire.a", "passed", "failed", CheckStatus.FAILED, "rude"),
        Change("wire.b", "failed", "passed", CheckStatus.PASSED, ""),
        Change("wire.old", "passed", "", CheckStatus.PASSED, ""),
        Change("wire.new", "", "passed", CheckStatus.PASSED, ""),
    )


def test_a_number_stands_with_both_limits() -> None:
    """And says where it is beyond its limit."""
    before = report(
        check("a", CheckStatus.PASSED, Number("spread", 0.25, "nat", at_most(0.5, "A/A")))
    )
    after = report(
        check("a", CheckStatus.FAILED, Number("spread", 0.7, "nat", at_most(0.6, "A/A")))
    )
    (change,) = compare(before, after).numbers
    assert change == Change(
        "wire.a: spread",
        "0.25 nat, at most 0.5 nat (A/A)",
        "0.7 nat, at most 0.6 nat (A/A) (beyond it)",
    )


def test_a_limit_alone_may_change() -> None:
    """It says how strict the check was."""
    before = report(check("a", CheckStatus.PASSED, Number("n", 1, limit=at_most(2))))
    after = report(check("a", CheckStatus.PASSED, Number("n", 1, limit=at_most(3))))
    assert len(compare(before, after).numbers) == 1


def test_a_number_of_one_report_is_a_change() -> None:
    """The other one has nothing in its place."""
    found = compare(report(check("a")), report(check("a", CheckStatus.PASSED, Number("n", 1))))
    assert found.numbers == (Change("wire.a: n", "", "1"),)


def test_flags_are_compared_by_their_names() -> None:
    """In whatever order and form they were given."""
    same = ("--seed=-1", "--enforce-eager", "--max-model-len=4096", "org/model")
    assert configured(flags=("org/model", *same[:-1])).configuration == ()
    found = configured(
        flags=("org/model", "--max-model-len", "8192", "--seed", "-1", "--port", "1")
    )
    assert found.configuration == (
        Change("flag --max-model-len", "4096", "8192"),
        Change("flag --enforce-eager", "given", ""),
        Change("flag --port", "", "1"),
    )


def test_every_part_of_the_configuration_is_compared() -> None:
    """What is unknown to one of the reports is a change, too."""
    found = configured(
        image="registry/holdfast:2",
        versions={"torch": "2.14.0"},
        variables={},
        fingerprint="01",
        devices=("NVIDIA H200",),
        driver="580",
        max_num_batched_tokens=2048,
        max_num_seqs=16,
        model="org/model",
        revision="c" * 40,
        files=(ModelFile("config.json", 701),),
    )
    assert {change.what for change in found.configuration} == {
        *("image", "version of torch", "variable VLLM_USE_V1", "fingerprint", "devices"),
        *("driver", "max_num_batched_tokens", "max_num_seqs"),
        *("model from", "revision", "file config.json"),
    }


def test_another_server_is_compared_as_far_as_it_tells() -> None:
    """One that is not Holdfast has no configuration and no proof."""
    one, other = check("chat"), replace(SERVER, holdfast=None, configuration=None, vllm="0.33.0")
    found = {
        change.what: change
        for change in compare(report(one), report(one, server=other)).configuration
    }
    assert found["version of vllm"] == Change("version of vllm", "0.32.0", "0.33.0")
    assert found["proof: proven_tokens"].after == ""
    assert found["flag --enforce-eager"].after == ""
