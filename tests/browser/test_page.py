"""The status page in a real Chromium, with a script in place of a server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from browsers import DESK_WIDTH, PHONE_WIDTH, Scheme, Tab, chromium, needs_browser, new_tab
from holdfast.status_page import feed as feeds
from scripted_page import (
    GIB,
    HOUR,
    MIB,
    ScriptedPage,
    a_document,
    a_rank,
    a_start,
    ago,
    ranks_on,
    scripted_page,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = needs_browser
NARROW_WIDTH = 320
"""The narrowest screen that WCAG 1.4.10 asks for."""
on_every_screen = pytest.mark.parametrize("width", [NARROW_WIDTH, PHONE_WIDTH, DESK_WIDTH])
in_every_scheme = pytest.mark.parametrize("scheme", ["light", "dark"])
CONNECTIONS = """
window.connections = [];
new MutationObserver(() => window.connections.push(document.body.dataset.connection))
  .observe(document.body, { attributes: true });
"""
NOTHING_KEPT = """
Object.defineProperty(window, "sessionStorage", { get() { throw new Error("not allowed"); } });
"""
HIDDEN = """
Object.defineProperty(document, "hidden", { get: () => window.isHidden ?? false });
"""
WIDTHS = "parts => parts.map((part) => part.width.baseVal.valueInSpecifiedUnits)"
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><b>bold</b>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests of this file."""
    with chromium() as started:
        yield started


@pytest.fixture
def script() -> Iterator[ScriptedPage]:
    """A server that says what the test wants."""
    with scripted_page(a_document()) as page:
        yield page


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    """A page that is empty, and whose console has to stay so."""
    with new_tab(browser) as opened:
        yield opened
        assert opened.complaints == []


def opened(tab: Tab, script: ScriptedPage, state: str = "READY") -> None:
    """Open the page and wait until it shows a state."""
    tab.page.goto(script.url)
    tab.until_text("#word", state)


def test_the_four_bands_show_the_report(tab: Tab, script: ScriptedPage) -> None:
    """State, memory, requests and proof, in words that people read."""
    opened(tab, script)
    assert tab.texts("#word p") == ["READY", "131071 tokens proven"]
    facts = tab.text("#facts")
    for said in ("generation 2", "1 restart, 4 left", "131,071 tokens", "Scripted GPU", "gone"):
        assert said in facts
    assert "weights" in tab.text("#memory .legend")
    assert "61 GiB" in tab.text("#memory .legend")
    assert "the rank may grow by 956 MiB in all" in tab.text("#memory summary")
    assert "57,344 of 96,000" in tab.text("#rows")
    assert tab.texts("#rows tr[data-key='18'] td")[4:] == ["130", "14.2", "2", "1"]
    assert "overloaded 3" in tab.text("#reasons")
    assert "full context" in tab.text("#steps")
    assert "there is no baseline" in tab.text("#steps")
    assert "41 passed" in tab.text("#verdicts")
    assert "0 rows" in tab.text("#verdicts")
    assert tab.text("#trend") == "The canary over the last hour: 24 runs, at most 0.001 nat off."
    assert tab.page.title() == "READY · scripted-model · Holdfast"


def test_a_start_says_when_it_will_be_ready(tab: Tab, script: ScriptedPage) -> None:
    """With what it does now, and how far it is; later, how late it is."""
    script.document = a_start()
    opened(tab, script, "PROBING")
    doing = "probe, full context, 512 tokens, 1 of 2"
    assert re.fullmatch(rf"READY in \d+ s · {doing}", tab.text("#expectation p"))
    assert 0.4 < progress(tab) < 1
    script.change(ready_expected=ago(10))
    tab.until_text("#expectation", f" s overdue · {doing}")
    assert progress(tab) == 1
    script.change(ready_expected=None)
    tab.until("() => !document.querySelector('#expectation progress')")
    assert tab.text("#expectation") == doing


def progress(tab: Tab) -> float:
    """How far the bar of a start is, from 0 to 1."""
    return float(tab.page.locator("#expectation progress").evaluate("bar => bar.value"))


def test_a_canary_with_other_tokens_is_counted(tab: Tab, script: ScriptedPage) -> None:
    """Its difference is infinite, which JSON cannot write: it is said without a number."""
    proof, history = script.document["proof"], script.document["history"]
    proof["baseline"]["canary"] = {"agrees": False, "compared": ago(50)}
    newest = max(history["points"], key=int)
    history["points"][newest]["canary_agrees"] = False
    opened(tab, script)
    runs = "25 runs, at most 0.001 nat off, 1 found other tokens"
    assert tab.text("#trend") == f"The canary over the last hour: {runs}."
    assert tab.page.locator("#trend [data-bad]").count() == 1
    assert "other tokens than the baseline" in tab.text("#verdicts [data-verdict='bad']")


def test_the_states_are_bands_of_the_time_line(tab: Tab, script: ScriptedPage) -> None:
    """Each as wide as it was long, of as many hours as the reader has chosen."""
    opened(tab, script)
    choose_hours(tab, 24)
    assert widths_of(tab, "RECOVERING") == [pytest.approx(100 * 0.2 / 24, abs=0.05)]
    before = 20 - 95 / HOUR - 3.2
    assert widths_of(tab, "READY") == [
        pytest.approx(100 * before / 24, abs=0.05),
        pytest.approx(100 * 3 / 24, abs=0.05),
    ]
    ticks = tab.page.locator("#timeline .tick text").all_text_contents()
    assert ticks
    assert set(ticks) <= {f"{4 * each:02}:00" for each in range(6)}
    choose_hours(tab, 6)
    assert widths_of(tab, "RECOVERING") == [pytest.approx(100 * 0.2 / 6, abs=0.05)]
    assert tab.page.locator("#timeline .mark-death").count() == 1
    choose_hours(tab, 1)
    assert widths_of(tab, "READY") == [pytest.approx(100)]
    assert widths_of(tab, "RECOVERING") == []
    assert tab.page.locator("#timeline .mark").count() == 0


def test_a_planned_restart_is_no_death(tab: Tab, script: ScriptedPage) -> None:
    """Nobody has to do anything about it."""
    death = {"kind": "death", "cause": "requested", "reason": "--recycle-after"}
    planned = {"at": ago(60), "generation": 2, **death}
    script.document["timeline"]["9"] = planned
    script.document["engine"]["last_exit"] = "requested: --recycle-after"
    opened(tab, script)
    choose_hours(tab, 1)
    assert tab.page.locator("#timeline .mark-restart").count() == 1
    assert tab.page.locator("#timeline [data-bad], #timeline .mark-death").count() == 0
    said = tab.page.locator("#timeline svg.timeline").get_attribute("aria-label")
    assert said == "The last hour: 0 deaths, 0 growths"
    assert "last restart" in tab.text("#facts")


def test_each_of_several_engines_has_its_name(tab: Tab, script: ScriptedPage) -> None:
    """With data parallelism, all of them have a rank 0."""
    script.change(ranks={"0/0": a_rank(), "1/0": a_rank(engine=1)})
    opened(tab, script)
    assert tab.texts("#memory h3") == ["Engine 0, rank 0", "Engine 1, rank 0"]
    grown = tab.page.locator("#timeline .mark-growth").get_attribute("data-detail")
    assert grown is not None
    assert "on rank 0 of engine 0" in grown


def test_two_servers_of_one_origin_have_keys_of_their_own(tab: Tab, script: ScriptedPage) -> None:
    """A proxy may have several below it, which must not get each other's."""
    opened(tab, script)
    tab.page.evaluate("sessionStorage.setItem('holdfast-key /other/', 'of another server')")
    asked = []
    tab.page.on("request", lambda request: asked.append(request.headers.get("authorization")))
    tab.page.reload()
    tab.until_text("#word", "READY")
    assert set(asked) == {None}


def choose_hours(tab: Tab, hours: int) -> None:
    """Show this much of the time line."""
    tab.page.locator("#span label", has_text=f"{hours} h").first.click()
    name = "hour" if hours == 1 else f"{hours} hours"
    tab.until(
        "(said) => document.querySelector('#timeline svg').ariaLabel.startsWith(said)",
        f"The last {name}:",
    )


def widths_of(tab: Tab, state: str) -> list[float]:
    """The widths of the bands of a state, in percent of the time line, oldest first."""
    bands = tab.page.locator(f"#timeline .band[data-state='{state}']")
    return [float(width) for width in bands.evaluate_all(WIDTHS)]


def test_what_is_unknown_is_left_out(tab: Tab, script: ScriptedPage) -> None:
    """A server that has just begun knows nothing of ranks, proof or its future."""
    whole = script.document
    names = ("state", "reason", "since", "engine", "progress", "requests")
    first = {name: whole[name] for name in names}
    first["engine"] = {"generation": 0, "restarts": 0, "starts": 0}
    first["server"] = {"started": whole["server"]["started"], "versions": {}}
    script.document = {
        **first,
        "state": "STARTING",
        "timeline": {},
        "history": {"interval_seconds": 15, "points": {}},
    }
    opened(tab, script, "STARTING")
    shown = tab.text("main").replace("NaN in logits", "")
    for wrong in ("undefined", "NaN", "null", "Infinity", "Invalid"):
        assert wrong not in shown
    assert tab.text("#memory") == "No rank has measured its memory yet."


def test_what_the_server_says_is_never_markup(tab: Tab, script: ScriptedPage) -> None:
    """A reason, a caller and a key that look like HTML are shown as they are."""
    rank = a_rank()
    rank["slots"]["0/0"]["high_water_caller"] = HOSTILE
    requests = script.document["requests"]
    requests["rows"]["17"]["key"] = HOSTILE
    script.change(reason=HOSTILE, ranks={"0/0": rank}, requests=requests)
    opened(tab, script)
    for place in ("#word .reason", "#memory .caller >> nth=0", "#rows td >> nth=1"):
        assert tab.text(place) == HOSTILE
    assert tab.page.locator("main img, main b img").count() == 0


def test_a_growth_moves_in_the_map(tab: Tab, script: ScriptedPage) -> None:
    """A workspace gets longer within its scale, and its numbers change."""
    small, large = a_rank(), a_rank()
    large["slots"]["1/0"]["size_bytes"] = 768 * MIB
    script.change(ranks={"0/0": small})
    opened(tab, script)
    size = tab.page.locator("#memory tr[data-key='1/0'] .size")
    before = float(size.get_attribute("width").rstrip("%"))
    script.change(ranks={"0/0": large})
    tab.until_text("#memory tr[data-key='1/0']", "768 MiB")
    assert float(size.get_attribute("width").rstrip("%")) == pytest.approx(3 * before, rel=0.01)


def test_the_rows_of_a_workspace_are_drawn_when_it_is_opened(
    tab: Tab, script: ScriptedPage
) -> None:
    """With many ranks the tables begin closed; one that a reader opens stays open."""
    script.change(**ranks_on("left", "right"))
    opened(tab, script)
    tab.until("() => document.querySelectorAll('#memory .rank').length === 16")
    assert tab.page.locator("#memory tbody tr").count() == 0
    tab.page.locator("#memory [data-key='0/9'] summary").click()
    tab.until("() => document.querySelectorAll('#memory tbody tr').length === 2")
    ranks = ranks_on("left", "right")["ranks"]
    ranks["0/9"]["slots"]["1/0"]["size_bytes"] = 768 * MIB
    script.change(ranks=ranks)
    tab.until_text("#memory [data-key='0/9'] tbody", "768 MiB")
    assert tab.page.locator("#memory tbody tr").count() == 2


def test_memory_that_was_given_back_is_not_drawn(tab: Tab, script: ScriptedPage) -> None:
    """Without an engine that holds any there is the host, and what the last one counted."""
    given_back = {"slots", "memory", "kv_used_ratio", "retired_bytes", "persistent_bytes"}
    rank = {name: value for name, value in a_rank().items() if name not in given_back}
    script.change(state="SLEEPING", ranks={"0/0": rank})
    opened(tab, script, "SLEEPING")
    assert "No engine holds memory now." in tab.text("#memory")
    assert "14 GiB" in tab.text("#memory .legend")
    assert "weights" not in tab.text("#memory")
    assert "1 growth since" in tab.text("#memory .notes")


def test_a_key_that_is_checked_again_interrupts_nothing(
    tab: Tab, script: ScriptedPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream ends and goes on, and the page stays live."""
    monkeypatch.setattr(feeds, "MAX_STREAM_SECONDS", 0.2)
    opened(tab, script)
    tab.page.evaluate(CONNECTIONS)
    for number in range(3):
        script.change(reason=f"reason {number}")
        tab.until_text("#word", f"reason {number}")
    assert set(tab.page.evaluate("window.connections")) <= {"live"}


def test_the_bar_is_to_scale(tab: Tab, script: ScriptedPage) -> None:
    """The width of each part is its share of the memory, and all parts are the whole.

    Where a device shares the memory of its host, that is the whole.
    """
    opened(tab, script)
    widths: list[list[Any]] = tab.page.locator("#memory .bar >> nth=0").evaluate(
        "bar => [...bar.querySelectorAll('.part')].map((part) => "
        "[part.parentElement.dataset.part, part.width.baseVal.valueInSpecifiedUnits])"
    )
    shares = {str(name): float(width) for name, width in widths}
    assert shares["weights"] == pytest.approx(100 * 61 / 128, abs=0.01)
    assert shares["free"] == pytest.approx(100 * 14 / 128, abs=0.01)
    assert sum(shares.values()) == pytest.approx(100, abs=0.02)
    used = tab.page.locator("#memory .bar >> nth=0").locator("[data-part='KV cache'] .used")
    assert used.evaluate_all(WIDTHS) == [pytest.approx(0.42 * shares["KV cache"], abs=0.01)]


def test_the_keyboard_walks_through_a_bar_while_it_changes(tab: Tab, script: ScriptedPage) -> None:
    """The focus stays where it is, and the arrow keys read each part."""
    opened(tab, script)
    bar = tab.page.locator("#memory .bar >> nth=0")
    bar.focus()
    readout = ".memory .readout"
    assert "weights 61 GiB, KV cache" in tab.text(readout)
    tab.page.keyboard.press("ArrowRight")
    assert tab.text(readout) == "weights 61 GiB"
    script.change(ranks={"0/0": a_rank(retired_bytes=9 * GIB)})
    tab.until_text("#memory .legend", "9 GiB")
    tab.page.keyboard.press("ArrowRight")
    assert tab.text(readout) == "KV cache 32 GiB, 42 % used"


def test_a_hidden_page_draws_nothing_but_its_title(tab: Tab, script: ScriptedPage) -> None:
    """The title is what a reader of another tab sees; the rest comes when this one is seen."""
    tab.page.add_init_script(HIDDEN)
    opened(tab, script)
    tab.page.evaluate("window.isHidden = true")
    script.change(state="DRAINING")
    tab.until("() => document.title.startsWith('DRAINING')")
    assert "READY" in tab.text("#word")
    tab.page.evaluate("window.isHidden = false")
    tab.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    assert "DRAINING" in tab.text("#word")


def test_a_browser_that_keeps_nothing_shows_the_page(tab: Tab, script: ScriptedPage) -> None:
    """Some forbid a page to keep a key even for a tab."""
    tab.page.add_init_script(NOTHING_KEPT)
    opened(tab, script)
    assert tab.text("#connection") == "live"


def test_a_table_stays_open_while_it_changes(tab: Tab, script: ScriptedPage) -> None:
    """The events of the time line are there as a table, newest first."""
    opened(tab, script)
    tab.page.locator(".life summary").click()
    tab.until_text("#events", "worker exit: rank 0: SIGKILL")
    assert "verify" in tab.texts("#events tr")[0]
    script.change(reason="something else")
    tab.until_text("#word", "something else")
    assert tab.page.locator("#events").is_visible()


def test_a_server_that_comes_back_is_followed_again(tab: Tab) -> None:
    """At its end the page says "stopped"; it keeps what it knew, and soon tries again by itself."""
    with scripted_page(a_document()) as first:
        opened(tab, first)
        port = first.port
    tab.until_text("#connection", "The server has stopped.")
    assert tab.text("#word p >> nth=0") == "READY"
    assert tab.page.title().startswith("stopped")
    with scripted_page({**a_document(), "state": "STARTING"}, port=port):
        tab.until_text("#word", "STARTING")
        assert tab.text("#connection") == "live"


@in_every_scheme
def test_what_a_stopped_server_said_can_be_read_by_all(browser: Browser, scheme: Scheme) -> None:
    """It looks old, and axe finds nothing serious."""
    with new_tab(browser, scheme=scheme) as tab:
        with scripted_page(a_document()) as script:
            opened(tab, script)
        tab.until_text("#connection", "The server has stopped.")
        assert tab.serious_findings() == []
        assert tab.complaints == []


def test_what_the_policy_forbids_is_a_complaint(browser: Browser, script: ScriptedPage) -> None:
    """A style within the page, which Chromium refuses to apply, would fail every test here."""
    with new_tab(browser) as tab:
        opened(tab, script)
        assert tab.complaints == []
        tab.page.evaluate("document.body.setAttribute('style', 'color: red')")
        tab.until("() => getComputedStyle(document.body).color !== 'rgb(255, 0, 0)'")
        (complaint,) = tab.complaints
    assert "Content Security Policy" in complaint


def test_many_ranks_fit(browser: Browser, script: ScriptedPage) -> None:
    """On two nodes, with all tables open, on the narrowest screen."""
    script.change(**ranks_on("left", "right"))
    with new_tab(browser, width=NARROW_WIDTH) as tab:
        opened(tab, script)
        tab.page.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
        tab.until("() => document.querySelectorAll('#memory tbody tr').length === 32")
        assert tab.pixels_beside == 0
        assert tab.complaints == []


@in_every_scheme
@on_every_screen
def test_the_page_fits_and_can_be_used_by_all(
    browser: Browser, script: ScriptedPage, width: int, scheme: Scheme
) -> None:
    """Nothing is beside the screen, and axe finds nothing serious, with all tables open."""
    with new_tab(browser, width=width, scheme=scheme) as tab:
        opened(tab, script)
        tab.page.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
        tab.until_text("#events", "SIGKILL")
        tab.until_text("#history", "2")
        assert tab.pixels_beside == 0
        assert tab.serious_findings() == []
        assert tab.complaints == []


def test_the_charts_follow_the_scheme(tab: Tab, script: ScriptedPage) -> None:
    """They are drawn again when the screen turns dark, and say what they show in words."""
    opened(tab, script)
    tab.page.emulate_media(color_scheme="dark")
    charts = tab.page.locator("#curves .plot")
    assert charts.count() == 4
    assert "136 tokens/s at most" in str(charts.first.get_attribute("aria-label"))
    assert tab.page.locator("#curves canvas").count() == 4
