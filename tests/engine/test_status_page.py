"""The status page in a real Chromium, over the life of a real engine.

The tests tell that life in order.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from browsers import Scheme, Tab, chromium, needs_browser, new_tab, picture_directory
from faults import FaultyServer
from holdfast.demo.switches import DemoFault, DemoSwitches
from servers import SMALL, Server, reserved_port, running, wait_until
from untrained import untrained_demo

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), *needs_browser]

KEY = "hush-this-key-opens-the-page"
STREAM = "/statusz/stream"
WORDS = "what-a-client-says-is-its-own"
LONG_ANSWER_TOKENS = 2000
"""An answer of this many tokens lasts for seconds."""
GROWTH_BYTES = 24 * 1024 * 1024
SLOW_STEP_TOKENS = 1000
"""A step with this many tokens takes long enough to be seen: each chunk of a long prompt does."""
LONG_PROMPT_TOKENS = 8000
MOST_PROMPTS = 3
"""That the page may need to show how far one is."""
VIEWERS = 50
STREAM_REQUEST = (
    f"GET {STREAM} HTTP/1.1\r\nHost: page\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
)
KEPT_LIFE_SECONDS = 100.0
FLAGS = (
    *SMALL,
    "--probe=quick",
    "--served-model-name=holdfast-demo",
    "--workspace-growth-limit=48MiB",
    "--log-format=console",
)
RECORDER = """
window.states = [];
window.prefilled = [];
new MutationObserver(() => {
  const state = document.querySelector("#word .word")?.textContent;
  if (state && window.states.at(-1) !== state) window.states.push(state);
  const prefilled = document.querySelector("#rows progress")?.value;
  if (prefilled && window.prefilled.at(-1) !== prefilled) {
    window.prefilled.push(prefilled);
    window.row = document.querySelector("#rows tr").textContent;
  }
}).observe(document, { subtree: true, childList: true, attributes: true, characterData: true });
"""
"""Keeps what the page has shown, since a test that asks now and then would miss some of it."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A server, the page that has been open since it began, and what triggers its faults."""

    server: Server
    tab: Tab
    triggers: Path
    directory: Path
    flags: tuple[str, ...]
    port: int

    @property
    def states(self) -> list[str]:
        """The states that the page has shown, in order, perhaps without the shortest."""
        return [str(state) for state in self.tab.page.evaluate("window.states")]

    def until_another(self, selector: str, before: str) -> None:
        """Wait until an element has another text than before."""
        self.tab.until(
            "([where, what]) => document.querySelector(where).innerText !== what",
            [selector, before],
        )


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests of this file."""
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def watched(
    browser: Browser, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    """A server that has just begun, and the page, opened with its key."""
    directory = tmp_path_factory.mktemp("page")
    (directory / "keys.txt").write_text(f"{KEY}\n")
    model = growing_model(models, directory)
    flags = (str(model), *FLAGS, f"--api-key-file={directory / 'keys.txt'}")
    with (
        reserved_port() as port,
        new_tab(browser) as tab,
        running(directory, *flags, port=port) as server,
    ):
        server.use_key(KEY)
        server.until(lambda: server.get("/livez").status_code == 200, "the listener")
        tab.page.add_init_script(RECORDER)
        tab.page.goto(f"{server.url}/ui")
        log_in(tab, KEY)
        tab.until_text("#connection", "live")
        yield Watched(server, tab, directory, directory, flags, port)
        assert tab.complaints == []


@pytest.fixture
def asking() -> Iterator[ThreadPoolExecutor]:
    """Threads for requests that run while the page is looked at."""
    with ThreadPoolExecutor() as pool:
        yield pool


def growing_model(models: Path, triggers: Path) -> Path:
    """Make a demo model that can be made to grow a workspace, and whose large steps are slow."""
    grow = str(triggers / "grow")
    faults = (
        DemoFault("step_tokens", 1, "scratch", scratch_bytes=GROWTH_BYTES, armed_by=grow),
        DemoFault("step_tokens", SLOW_STEP_TOKENS, "slow", seconds=1.5),
    )
    return untrained_demo(models, DemoSwitches(faults=faults))


def log_in(tab: Tab, key: str) -> None:
    """Enter a key into the form."""
    tab.page.locator("#key").fill(key)
    tab.page.locator("#log-in button").click()


def long_prompt(pool: ThreadPoolExecutor, server: Server) -> Future[httpx.Response]:
    """Have a prompt computed that no cache knows."""
    prompt = [random.randrange(10, 250) for _ in range(LONG_PROMPT_TOKENS)]
    return pool.submit(server.completion, prompt, timeout=240)


def watched_prefill(watched: Watched, pool: ThreadPoolExecutor) -> Future[httpx.Response]:
    """Have a prompt computed while the page shows how far it is, twice at least.

    A page that gets no turn on a busy machine misses a whole prompt, so up to two others follow.
    """
    answers = list[Future[httpx.Response]]()

    def ask() -> None:
        watched.tab.page.evaluate("window.prefilled = []")
        answers.append(long_prompt(pool, watched.server))

    def is_seen() -> bool:
        is_over = answers[-1].done()
        if watched.tab.page.evaluate("window.prefilled.length >= 2"):
            return True
        if is_over:
            assert len(answers) < MOST_PROMPTS, f"{len(answers)} prompts were not seen"
            ask()
        return False

    ask()

    wait_until(is_seen, deadline_seconds=180, what=lambda: f"{len(answers)} prompts were not seen")
    return answers[-1]


def live(server: Server) -> None:
    """Ask for a few minutes, so that a picture has curves."""
    until_seconds = time.monotonic() + KEPT_LIFE_SECONDS
    while time.monotonic() < until_seconds:
        with ThreadPoolExecutor() as pool:
            for number in range(random.randrange(1, 7)):
                length = random.randrange(20, 200)
                pool.submit(server.completion, f"{number}", max_tokens=length, stream=True)


def say_words(server: Server, **options: object) -> httpx.Response:
    """Ask with a text that is nobody else's, wherever a client may put one."""
    body = {
        "model": "holdfast-demo",
        "prompt": WORDS,
        "stop": WORDS,
        "user": WORDS,
        "ignore_eos": True,
        "max_tokens": LONG_ANSWER_TOKENS,
        **options,
    }
    headers = {"X-Request-Id": WORDS}
    return server.post("/v1/completions", body, headers=headers, timeout=240)


@contextmanager
def overheard(watched: Watched) -> Iterator[bytearray]:
    """Every byte that one more viewer gets while entered."""
    heard = bytearray()

    def listen(viewer: socket.socket) -> None:
        while received := viewer.recv(1 << 16):
            heard.extend(received)

    with (
        ThreadPoolExecutor() as pool,
        socket.create_connection(("127.0.0.1", watched.port)) as viewer,
    ):
        viewer.sendall(STREAM_REQUEST)
        listening = pool.submit(listen, viewer)
        try:
            yield heard
        finally:
            viewer.shutdown(socket.SHUT_RDWR)
            listening.result()


@contextmanager
def viewer(client: httpx.Client, server: Server) -> Iterator[Iterator[str]]:
    """The lines of the stream, as one more viewer gets them."""
    headers = {"authorization": f"Bearer {KEY}"}
    with client.stream("GET", f"{server.url}{STREAM}", headers=headers) as response:
        assert response.status_code == 200
        yield response.iter_lines()


def until_event(lines: Iterator[str], name: str) -> None:
    """Read a stream until an event of this name begins."""
    assert any(line == f"event: {name}" for line in lines), f"it ended without {name}"


def test_a_start_is_watched_until_it_is_ready(watched: Watched) -> None:
    """The page is there from the first second, and shows the states and what was proven."""
    watched.tab.until_text("#word", "READY")
    assert watched.states == ["STARTING", "PROBING", "READY"]
    assert "tokens" in watched.tab.text("#verdicts")
    assert "full context" in watched.tab.text("#steps")
    assert watched.tab.page.locator("#memory .bar").count() >= 1


def test_a_growth_is_seen_in_the_map(watched: Watched) -> None:
    """The workspace is larger than before, and the time line has a mark."""
    before = watched.tab.text("#memory tbody tr")
    (watched.triggers / "grow").touch()
    assert watched.server.completion("grow").status_code == 200
    watched.tab.until_text("#memory .notes", "1 growth since")
    watched.until_another("#memory tbody tr", before)
    watched.tab.until_text("#legend", "growth")


def test_a_long_prefill_moves(watched: Watched, asking: ThreadPoolExecutor) -> None:
    """Its row counts the tokens that are computed, chunk by chunk, and names its key alone."""
    answer = watched_prefill(watched, asking)
    seen, row = watched.tab.page.evaluate("[window.prefilled, window.row]")
    assert seen == sorted(seen)
    assert f"of {LONG_PROMPT_TOKENS:,}" in row
    assert "key-" in row
    assert KEY not in row
    assert answer.result().status_code == 200
    watched.tab.until_text("#rows", "No request is running.")


def test_the_words_of_a_client_are_shown_to_nobody(
    watched: Watched, asking: ThreadPoolExecutor
) -> None:
    """Neither on the stream nor as text, while its requests run and when one is refused."""
    texts, seen = list[str](), threading.Event()

    def is_in_text() -> bool:
        texts.append(watched.server.get("/ui").text)
        return "decode" in texts[-1]

    def say_on() -> set[int]:
        statuses = set()
        while not seen.is_set():
            statuses.add(say_words(watched.server).status_code)
        return statuses

    with overheard(watched) as heard:
        answers = asking.submit(say_on)
        try:
            watched.tab.until_text("#rows", "decode")
            watched.server.until(lambda: b'"stage":"decode"' in heard, "the row of a request")
            watched.server.until(is_in_text, "the row of a request as text")
            assert say_words(watched.server, max_tokens=WORDS).status_code == 400
            texts.append(watched.server.get("/ui").text)
        finally:
            seen.set()
        assert answers.result() == {200}
        watched.tab.until_text("#rows", "No request is running.")
    assert WORDS not in "".join(texts)
    assert WORDS.encode() not in heard


def test_the_curves_have_what_clients_were_sent(watched: Watched) -> None:
    """The tokens of a streamed answer, and the time to its first one."""
    assert watched.server.completion("look", stream=True).status_code == 200
    label = "document.querySelector('#chart-{} .plot').ariaLabel"
    watched.tab.until(f"() => !{label.format('first-token')}.includes('unknown')")
    watched.tab.until(f"() => /[1-9]\\S* tokens.s at most/.test({label.format('output')})")


def test_only_the_right_key_opens_the_page(watched: Watched, browser: Browser) -> None:
    """A wrong one is refused in words; the right one stays in this tab, and in no address."""
    with new_tab(browser) as tab:
        tab.page.goto(f"{watched.server.url}/ui")
        tab.page.locator("#log-in").wait_for()
        assert tab.serious_findings() == []
        log_in(tab, "a-wrong-key")
        tab.until_text("#problem", "key")
        assert tab.page.locator("#bands").is_hidden()
        log_in(tab, KEY)
        tab.until_text("#word", "READY")
        assert KEY not in tab.page.url
        assert tab.page.context.cookies() == []
        tab.page.reload()
        tab.until_text("#word", "READY")
        tab.page.locator("#forget").click()
        tab.page.locator("#log-in").wait_for()
        assert tab.page.locator("#bands").is_hidden()
        assert tab.complaints == []


def test_fifty_viewers_see_the_same(watched: Watched) -> None:
    """Each of them gets the whole report, and then what changes."""
    before = watched.tab.text("#memory .notes")
    limits = httpx.Limits(max_connections=None)
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=60, trust_env=False, limits=limits))
        streams = [stack.enter_context(viewer(client, watched.server)) for _ in range(VIEWERS - 1)]
        for lines in streams:
            until_event(lines, "snapshot")
        assert watched.server.completion("look").status_code == 200
        for lines in streams:
            until_event(lines, "change")
        watched.until_another("#memory .notes", before)


def test_a_viewer_that_does_not_read_holds_nobody_up(watched: Watched) -> None:
    """The page goes on to change beside it; tests/http fills the buffers of such a one."""
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", watched.port))
        slow.sendall(STREAM_REQUEST)
        for _ in range(3):
            before = watched.tab.text("#memory .notes")
            assert watched.server.completion("look").status_code == 200
            watched.until_another("#memory .notes", before)
        assert watched.tab.text("#connection") == "live"


def test_a_death_is_on_the_time_line(watched: Watched, asking: ThreadPoolExecutor) -> None:
    """The page shows the recovery while no engine runs, and keeps the death with its cause.

    What the engine was asked is not part of that.
    """
    with overheard(watched) as heard:
        answer = asking.submit(say_words, watched.server)
        watched.tab.until_text("#rows", "decode")
        FaultyServer(watched.server, watched.triggers).process("EngineCore").kill()
        watched.tab.until("() => window.states.includes('RECOVERING')")
        watched.tab.until("() => window.states.at(-1) === 'READY'")
        assert answer.result().status_code == 200
    assert b"SIGKILL" in heard
    assert WORDS.encode() not in heard
    assert watched.tab.page.locator("#timeline .mark-death").count() == 1
    watched.tab.page.locator(".life summary").click()
    watched.tab.until_text("#events", "SIGKILL")
    watched.tab.page.locator(".life summary").click()
    assert "generation 2" in watched.tab.text("#facts")


def test_pictures_of_the_page(
    watched: Watched, browser: Browser, asking: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """In both schemes while requests run; `PICTURES` says where to keep them."""
    directory = picture_directory(tmp_path)
    if directory != tmp_path:
        live(watched.server)
    answers = [
        asking.submit(
            watched.server.completion, f"{number}", max_tokens=400, ignore_eos=True, stream=True
        )
        for number in range(4)
    ]
    answers.append(long_prompt(asking, watched.server))
    schemes: tuple[Scheme, ...] = ("light", "dark")
    for scheme in schemes:
        with new_tab(browser, scheme=scheme) as tab:
            tab.page.goto(f"{watched.server.url}/ui")
            log_in(tab, KEY)
            tab.until_text("#word", "READY")
            tab.until("() => document.querySelectorAll('#curves canvas').length === 4")
            picture = directory / f"status-page-{scheme}.png"
            tab.page.screenshot(path=picture, full_page=True)
            assert picture.read_bytes().startswith(b"\x89PNG")
            assert tab.complaints == []
    assert {answer.result().status_code for answer in answers} == {200}


def test_the_page_outlives_the_server(watched: Watched) -> None:
    """It says that the server has stopped, and follows the next one on the same port."""
    watched.server.stop()
    watched.tab.until_text("#connection", "The server has stopped.")
    assert watched.tab.text("#word .word") in {"DRAINING", "STOPPED"}
    with running(watched.directory, *watched.flags, port=watched.port) as again:
        again.until(lambda: again.get("/livez").status_code == 200, "the listener")
        watched.tab.retry()
        watched.tab.until_text("#connection", "live")
        watched.tab.until(
            "(states) => states.includes(document.querySelector('#word .word')?.textContent)",
            ["STARTING", "PROBING", "READY"],
        )
