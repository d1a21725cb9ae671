"""`holdfast verify` against the demo model: a sound model passes, on every code path."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from browsers import Scheme, chromium, needs_browser, new_tab, picture_directory
from holdfast.demo.trained import is_trained
from holdfast.verify.baseline import read_baseline
from holdfast.verify.checks import oracle
from holdfast.verify.command import EXIT_CODES
from holdfast.verify.options import Options
from holdfast.verify.records import CheckStatus, Verdict, at_most
from servers import Server
from verified import (
    BEYOND_TRAINED_WEIGHTS,
    Run,
    is_left_to_chance,
    not_passed,
    require_report,
    results_at,
    verified_at,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.shares_engine("demo"),
    pytest.mark.timeout(900),
]

RUN_DEADLINE_SECONDS = 600
BEYOND_STANDARD = {
    **BEYOND_TRAINED_WEIGHTS,
    "self.beside_adapter": CheckStatus.SKIPPED,
    "survive.death": CheckStatus.SKIPPED,
}
"""Without an adapter, and without a command that kills the engine."""


@pytest.fixture(scope="module")
def quick(demo: Server, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What README has a user start."""
    demo.until(lambda: demo.status["configuration"]["files"], "the files of the model")
    directory = tmp_path_factory.mktemp("quick")
    return asyncio.run(verified_at(demo.url, directory, deadline_seconds=RUN_DEADLINE_SECONDS))


@pytest.fixture(scope="module")
def standard(demo: Server, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The larger profile, by the same command, with a baseline recorded as well."""
    directory = tmp_path_factory.mktemp("standard")
    arguments = ("--profile=standard", f"--record={directory / 'demo.baseline'}")
    run = verified_at(demo.url, directory, *arguments, deadline_seconds=RUN_DEADLINE_SECONDS)
    return asyncio.run(run)


def require_passed(run: Run, beyond: Mapping[str, CheckStatus]) -> None:
    """Fail unless all passed but what is beyond the demo, each with the status that it should have.

    The demo's server accepts functions, so their checks are judged.
    """
    assert run.errors == ""
    require_report(run.report)
    made = run.results
    reasons = {name: made[name].reason for name in not_passed(made)}
    found = {name: one for name, one in not_passed(made).items() if not is_left_to_chance(name)}
    expected = {name: one for name, one in beyond.items() if not is_left_to_chance(name)}
    assert found == expected, reasons
    assert run.code == EXIT_CODES[Verdict.PASSED] or not is_trained(), reasons


def test_every_check_of_standard_passes(standard: Run) -> None:
    """Nothing fails or is left open; in float32 on a CPU, noise is none."""
    require_passed(standard, BEYOND_STANDARD)
    numbers = standard.results["self.full_batch"].numbers
    (limits,) = {number.limit for number in numbers if number.unit == "nat"}
    assert limits == at_most(0, "A/A")


def test_what_a_user_starts_passes(quick: Run) -> None:
    """The command runs every check of its profile, and says so in a report of its own schema."""
    require_passed(quick, BEYOND_TRAINED_WEIGHTS)


def test_the_report_names_what_was_verified(demo: Server, quick: Run) -> None:
    """What the server says of itself: image, versions, flags, fingerprint, files and the proof."""
    told = quick.report["server"]
    assert told["configuration"] == demo.status["configuration"]
    assert told["holdfast"]["proof"]["proven_tokens"] == demo.status["probe"]["proven_tokens"]


def test_what_a_user_records_is_met(demo: Server, standard: Run) -> None:
    """`test_recorder.py` has the command compare as well."""
    options = Options(read_baseline(standard.directory.parent / "demo.baseline"))
    met = results_at(demo.url, oracle.comparing.CHECKS, options)
    assert len(met) == 4
    assert {name: met[name].reason for name in not_passed(met)} == {}


@pytest.mark.parametrize(
    "scheme", [pytest.param(scheme, marks=needs_browser) for scheme in ("light", "dark")]
)
def test_its_report_is_a_page_to_look_at(quick: Run, scheme: Scheme, tmp_path: Path) -> None:
    """A browser has nothing against it; `PICTURES` says where to keep a picture."""
    picture = picture_directory(tmp_path) / f"verify-report-{scheme}.png"
    with chromium() as browser, new_tab(browser, scheme=scheme) as tab:
        tab.page.goto((quick.directory / "report.html").as_uri())
        assert tab.text("h1") == "holdfast-demo"
        assert tab.serious_findings() == []
        assert tab.complaints == []
        tab.page.screenshot(path=picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
