"""`holdfast verify` against the demo model: a sound model passes, on every code path."""

from __future__ import annotations

import asyncio
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
    Run,
    beyond_the_demo,
    not_passed,
    of_standard,
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


@pytest.fixture(scope="module")
def quick(demo: Server, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What a user starts, with a baseline recorded as well."""
    directory = tmp_path_factory.mktemp("quick")
    record = f"--record={directory / 'demo.baseline'}"
    run = verified_at(demo.url, directory, record, deadline_seconds=RUN_DEADLINE_SECONDS)
    return asyncio.run(run)


def reasons_of(run: Run) -> dict[str, str]:
    """What did not pass although the weights of the package should pass it, with the reason."""
    named = {f"{one['group']}.{one['name']}": one for one in run.report["checks"]}
    return {
        name: f"{one['status']}: {one['reason']}"
        for name, one in named.items()
        if one["status"] != CheckStatus.PASSED and not name.startswith(beyond_the_demo())
    }


def test_every_check_of_standard_passes(demo: Server) -> None:
    """Nothing fails or is left open; in float32 on a CPU, noise is none."""
    made = results_at(demo.url, of_standard(beyond_the_demo()))
    reasons = {name: made[name].reason for name in not_passed(made)}
    skipped = dict.fromkeys(("survive.death", "self.beside_adapter"), CheckStatus.SKIPPED)
    assert not_passed(made) == skipped, reasons
    (limits,) = {n.limit for n in made["self.full_batch"].numbers if n.unit == "nat"}
    assert limits == at_most(0, "A/A")


def test_what_a_user_starts_passes(quick: Run) -> None:
    """The command runs every check of its profile, and says so in a report of its own schema."""
    assert quick.errors == ""
    assert reasons_of(quick) == {}
    has_failed = any(one["status"] == CheckStatus.FAILED for one in quick.report["checks"])
    assert not (has_failed and is_trained())
    assert (quick.code == EXIT_CODES[Verdict.FAILED]) == has_failed
    require_report(quick.report)


def test_what_a_user_records_is_met(demo: Server, quick: Run) -> None:
    """`test_recorder.py` has the command compare as well."""
    options = Options(read_baseline(quick.directory.parent / "demo.baseline"))
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
