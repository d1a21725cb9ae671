"""The page and its stream over real sockets: what reaches whom, with which key, and how long."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import httpx
import pytest
from prometheus_client.registry import Collector

from holdfast.settings import LimitSettings
from holdfast.status_page import feed as feeds
from holdfast.status_page.shell import CONTENT_SECURITY_POLICY, StaticFiles
from listening import DEADLINE_SECONDS, Listening
from sample_status import a_status
from shown_page import API_KEY, HEADERS, ShownPage, viewing

HTML = {"accept": "text/html,application/xhtml+xml"}
KIB = 1024

Scene = Callable[[Listening, httpx.AsyncClient], Awaitable[None]]


@pytest.fixture(autouse=True)
def quick_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for changes more often than twice a second, however many viewers there are."""
    monkeypatch.setattr(feeds, "INTERVAL_SECONDS", 0.005)
    monkeypatch.setattr(feeds, "MAX_EVENTS_PER_SECOND", 1_000_000)


def served(shown: ShownPage, scene: Scene) -> None:
    """Play a scene while the page is served."""

    async def play() -> None:
        async with asyncio.timeout(DEADLINE_SECONDS), shown.served() as (server, client):
            await scene(server, client)

    asyncio.run(play())


def answers(
    shown: ShownPage, *requests: tuple[str, str, Mapping[str, str]]
) -> list[httpx.Response]:
    """The answers to requests of a method and a path with headers."""
    found: list[httpx.Response] = []

    async def ask(_: Listening, client: httpx.AsyncClient) -> None:
        for method, path, headers in requests:
            found.append(await client.request(method, path, headers=headers))

    served(shown, ask)
    return found


def test_a_viewer_gets_the_document_and_then_its_changes() -> None:
    """In a form that no proxy keeps back."""
    shown = ShownPage()

    async def scene(_: Listening, client: httpx.AsyncClient) -> None:
        async with viewing(client) as viewer:
            headers = viewer.response.headers
            assert headers["content-type"] == "text/event-stream; charset=utf-8"
            assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-store", "no")
            await viewer.until_document(state="READY")
            shown.status = a_status(reason="another")
            await viewer.until_document(reason="another")
        assert [event.name for event in viewer.events] == ["snapshot", "change"]
        assert viewer.events[1].data == '{"reason":"another"}'

    served(shown, scene)


def test_many_viewers_see_the_same() -> None:
    """And when the last of them has left, nobody builds the document any more."""
    shown = ShownPage()

    async def view(client: httpx.AsyncClient) -> None:
        async with viewing(client) as viewer:
            await viewer.until_document(state="READY")
            shown.status = replace(shown.status, reason="seen")
            await viewer.until_document(reason="seen")

    async def scene(_: Listening, client: httpx.AsyncClient) -> None:
        await asyncio.gather(*(view(client) for _ in range(20)))
        while shown.feed.viewers or shown.feed._producer:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0.001)

    served(shown, scene)


def test_a_viewer_that_comes_back_gets_what_it_missed() -> None:
    """By the id of the last event that it has."""
    shown = ShownPage()

    async def scene(_: Listening, client: httpx.AsyncClient) -> None:
        async with viewing(client) as viewer:
            await viewer.until_document(state="READY")
        shown.status = a_status(reason="meanwhile")
        headers = {"last-event-id": viewer.mirror.last_event_id}
        async with viewing(client, headers) as again:
            await again.until_document(reason="meanwhile")
        assert [event.name for event in again.events] == ["change"]

    served(shown, scene)


def test_further_viewers_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a time after which there may be room."""
    monkeypatch.setattr(feeds, "MAX_VIEWERS", 1)

    async def scene(_: Listening, client: httpx.AsyncClient) -> None:
        async with viewing(client) as viewer:
            await viewer.until_document(state="READY")
            refused = await client.get("/statusz/stream")
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) > 0
            assert "viewers" in refused.json()["error"]["message"]

    served(ShownPage(), scene)


def test_one_key_does_not_take_the_places_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A viewer that leaves makes room."""
    monkeypatch.setattr(feeds, "MAX_VIEWERS_PER_KEY", 1)
    shown = ShownPage(has_key=True)

    async def scene(_: Listening, client: httpx.AsyncClient) -> None:
        async with viewing(client, HEADERS) as viewer:
            await viewer.until_document(state="READY")
            assert (await client.get("/statusz/stream", headers=HEADERS)).status_code == 503
            assert not shown.feed.is_full("another")
        while shown.feed.viewers:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.001)
        async with viewing(client, HEADERS) as viewer:
            await viewer.until_document(state="READY")

    served(shown, scene)


def test_the_end_of_the_server_is_told() -> None:
    """After the last change; then the connection ends, so that the listener need not wait."""
    shown = ShownPage()

    async def play() -> list[str]:
        async with httpx.AsyncClient(timeout=DEADLINE_SECONDS) as outside:
            async with shown.served() as (server, _):
                outside.base_url = httpx.URL(f"http://127.0.0.1:{server.port}")
                stream = viewing(outside)
                viewer = await stream.__aenter__()
                await viewer.until_document(state="READY")
                shown.status = a_status(reason="stopped")
                reading = asyncio.create_task(viewer.until_end())
            async with asyncio.timeout(DEADLINE_SECONDS):
                await reading
            await stream.__aexit__(None, None, None)
        assert viewer.mirror.document["reason"] == "stopped"
        return [event.name for event in viewer.events]

    assert asyncio.run(play()) == ["snapshot", "change", "bye"]


def test_a_drain_does_not_wait_for_viewers() -> None:
    """A viewer is not a request: neither admitted, nor counted."""
    shown = ShownPage()

    async def scene(_: Listening, client: httpx.AsyncClient) -> None:
        async with viewing(client) as viewer:
            await viewer.until_document(state="READY")
            assert not shown.admission.is_busy
            assert shown.admission.in_flight == 0
        await client.get("/ui", headers=HTML)
        await client.get(f"/ui/{StaticFiles.read().digest}/nothing")
        await client.get("/v1/whoami")
        while "/v1/whoami" not in _counted(shown.counts):  # noqa: ASYNC110 - after its end
            await asyncio.sleep(0.001)
        assert _counted(shown.counts) == {"/v1/whoami": 1}

    served(shown, scene)


def _counted(counts: Collector) -> dict[str, float]:
    return {
        sample.labels["handler"]: sample.value
        for family in counts.collect()
        for sample in family.samples
        if sample.name == "http_requests_total"
    }


def test_the_time_of_a_request_is_not_that_of_a_viewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--request-timeout` bounds what an engine is asked for."""
    seconds = 0.1
    monkeypatch.setattr(feeds, "COMMENT_SECONDS", seconds)
    shown = ShownPage(limits=LimitSettings(request_timeout_seconds=seconds))

    async def scene(_: Listening, client: httpx.AsyncClient) -> None:
        async with viewing(client) as viewer:
            began_seconds = time.monotonic()
            await viewer.until(lambda: time.monotonic() > began_seconds + 3 * seconds)
            assert b": alive\n\n" in viewer.received
            shown.status = a_status(reason="still here")
            await viewer.until_document(reason="still here")

    served(shown, scene)


def test_a_viewer_is_a_connection() -> None:
    """`--max-connections` counts it, and it is not closed in favour of another."""
    shown = ShownPage(limits=LimitSettings(max_connections=1))

    async def scene(server: Listening, client: httpx.AsyncClient) -> None:
        async with viewing(client) as viewer:
            await viewer.until_document(state="READY")
            async with server.wire() as wire:
                await wire.send(b"GET /v1/whoami HTTP/1.1\r\nhost: x\r\n\r\n")
                assert (await wire.answer()).status == 503
            shown.status = a_status(reason="still here")
            await viewer.until_document(reason="still here")

    served(shown, scene)


def test_a_viewer_that_does_not_read_takes_a_bounded_room() -> None:
    """Changes that it cannot take are not kept for it, and the others get them."""
    shown = ShownPage()
    size_bytes = 32 * KIB

    async def scene(server: Listening, client: httpx.AsyncClient) -> None:
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * KIB)
            deaf.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(deaf, ("127.0.0.1", server.port))
            await loop.sock_sendall(deaf, b"GET /statusz/stream HTTP/1.1\r\nhost: x\r\n\r\n")
            while not shown.feed.viewers:  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.001)
            (connection,) = server.server.server_state.connections
            async with viewing(client) as viewer:
                for number in range(20 * feeds.KEPT_CHANGES):
                    reason = f"{number} {'x' * size_bytes}"
                    shown.status = a_status(reason=reason)
                    await viewer.until_document(reason=reason)
            kept_bytes = connection.transport.get_write_buffer_size()
            assert 0 < kept_bytes <= (feeds.KEPT_CHANGES + 4) * size_bytes

    served(shown, scene)


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/statusz/stream", {}, 401),
        ("GET", "/statusz/stream", {"authorization": "Bearer another"}, 401),
        ("HEAD", "/statusz/stream", HEADERS, 200),
        ("GET", "/ui", HTML, 200),
        ("HEAD", "/ui", HTML, 200),
        ("GET", "/ui", {}, 401),
        ("GET", "/ui", HEADERS, 200),
        ("GET", "/ui/0123456789abcdef/page.js", {}, 401),
        ("POST", "/ui", HTML, 401),
        ("GET", "/ui/other", HTML, 401),
        ("GET", "/ui/other", HEADERS, 404),
        ("GET", "/uiother", HTML, 401),
    ],
)
def test_the_files_need_no_key_and_the_data_does(
    method: str, path: str, headers: Mapping[str, str], status: int
) -> None:
    """A browser cannot send one for a page; the page asks for it."""
    (answer,) = answers(ShownPage(has_key=True), (method, path, headers))
    assert answer.status_code == status
    assert API_KEY not in answer.text


def test_every_file_of_the_page_is_served_without_a_key() -> None:
    """Under a name that changes with any of them, so that a browser never asks again."""
    files = StaticFiles.read()
    page, *found = answers(
        ShownPage(has_key=True),
        ("GET", "/ui", HTML),
        *(("GET", f"/ui/{files.digest}/{name}", {}) for name in files.contents),
    )
    assert f"ui/{files.digest}/".encode() in page.content
    assert b"ui/static/" not in page.content
    assert [answer.content for answer in found] == list(files.contents.values())
    for name, answer in zip(files.contents, found, strict=True):
        assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
        is_script = answer.headers["content-type"].startswith("text/javascript")
        assert is_script == name.endswith(".js")


def test_the_page_may_do_little() -> None:
    """It runs its own scripts and asks its own server, within no frame."""
    files = StaticFiles.read()
    for answer in answers(
        ShownPage(),
        ("GET", "/ui", HTML),
        ("GET", "/ui", {}),
        ("GET", "/ui/", HTML),
        ("GET", f"/ui/{files.digest}/page.js", {}),
        ("GET", f"/ui/{files.digest}/none.js", {}),
    ):
        assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert "unsafe" not in CONTENT_SECURITY_POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cross-origin-opener-policy"] == "same-origin"


def test_a_page_that_has_not_changed_is_not_sent_again() -> None:
    """The browser asks each time, so that it notices another version."""
    shown = ShownPage()

    async def scene(_: Listening, client: httpx.AsyncClient) -> None:
        first = await client.get("/ui", headers=HTML)
        assert first.headers["cache-control"] == "no-cache"
        etag = first.headers["etag"]
        again = await client.get("/ui", headers={**HTML, "if-none-match": etag})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
        other = await client.get("/ui", headers={**HTML, "if-none-match": '"another"'})
        assert other.status_code == 200

    served(shown, scene)


def test_another_version_of_a_file_is_not_served() -> None:
    """The page that refers to it is older than this server."""
    files = StaticFiles.read()
    found = answers(
        ShownPage(),
        ("GET", "/ui/0123456789abcdef/page.js", {}),
        ("GET", f"/ui/{files.digest}/../page.py", {}),
        ("GET", f"/ui/{files.digest}/%2e%2e/page.py", {}),
    )
    assert [answer.status_code for answer in found] == [404, 404, 404]


@pytest.mark.parametrize(("root_path", "path"), [("", "/ui/"), ("/prefix", "/prefix/ui/")])
def test_a_final_slash_leads_to_the_page(root_path: str, path: str) -> None:
    """To whose path its files are relative, also behind a proxy."""
    (answer,) = answers(ShownPage(root_path=root_path), ("GET", path, HTML))
    assert (answer.status_code, answer.headers["location"]) == (308, "../ui")


def test_a_client_that_does_not_ask_for_html_gets_text() -> None:
    """The same numbers, for `curl`."""
    (answer,) = answers(ShownPage(), ("GET", "/ui", {"accept": "*/*"}))
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.text.startswith("READY for ")
    assert "slot 0/0" in answer.text


def test_a_page_that_is_off_is_not_there() -> None:
    """Neither the page nor the stream; both paths are then those of vLLM's application."""
    found = answers(
        ShownPage(is_on=False),
        ("GET", "/ui", HTML),
        ("GET", "/statusz/stream", {}),
        ("GET", f"/ui/{StaticFiles.read().digest}/page.js", {}),
    )
    assert [answer.status_code for answer in found] == [404, 404, 404]
    (guarded,) = answers(ShownPage(is_on=False, has_key=True), ("GET", "/ui", HTML))
    assert guarded.status_code == 401


def test_other_methods_are_not_allowed() -> None:
    """Nothing can be changed here."""
    found = answers(ShownPage(), ("POST", "/statusz/stream", {}), ("DELETE", "/ui", {}))
    assert [answer.status_code for answer in found] == [405, 405]


def test_the_history_of_a_start_is_on_the_page() -> None:
    """Its states from the first on, for later viewers."""
    shown = ShownPage()

    async def scene(_: Listening, client: httpx.AsyncClient) -> None:
        shown.page.progress.state_changed("RECOVERING", "the engine died")
        async with viewing(client) as viewer:
            await viewer.until_document(state="READY")
        timeline: Mapping[str, Mapping[str, Any]] = viewer.mirror.document["timeline"]
        states = [event["state"] for event in timeline.values() if event["kind"] == "state"]
        assert states == ["READY", "RECOVERING"]

    served(shown, scene)
