"""What scrapers of `/metrics` get, and what they cost everybody else."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.routing import Route

from asgi_server import DEADLINE_SECONDS
from holdfast.api.admission import Admission
from holdfast.api.load import LoadView
from holdfast.api.metrics import (
    MAX_CHOSEN_PAGES,
    PAUSE_FACTOR,
    metrics_route,
    request_counts,
)
from holdfast.engine.requests.sequence_queue import Capacity
from holdfast.request_context import RequestContext
from holdfast.telemetry.collector import RequestCounts
from holdfast.telemetry.counters import Refusals
from holdfast.telemetry.exposition import CONTENT_TYPES, format_for
from holdfast.telemetry.load import Load
from inner_app import View
from replay_harness import ReplayHarness, run_scene


class Pages(Collector):
    """A registry that numbers its pages, and finishes each when the test releases it."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)
        self.threads: list[threading.Thread] = []
        self.has_two_at_once = False
        self._one_at_a_time = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        self.threads.append(threading.current_thread())
        number = len(self.threads)
        is_alone = self._one_at_a_time.acquire(blocking=False)
        self.has_two_at_once |= not is_alone
        self.begun.release()
        assert self.may_end.acquire(timeout=DEADLINE_SECONDS)
        if is_alone:
            self._one_at_a_time.release()
        yield GaugeMetricFamily("page", "Its number.", number)


async def scraped(route: Route, accept: str = "", query: str = "") -> bytes:
    """The page that a scraper gets."""
    headers = [(b"accept", accept.encode())]
    scope = {"type": "http", "method": "GET", "headers": headers, "query_string": query.encode()}
    request = Request(scope)
    async with asyncio.timeout(DEADLINE_SECONDS):
        answer = await route.endpoint(request)
    return bytes(answer.body)


async def until_begun(pages: Pages) -> None:
    """Return when another page is being rendered."""
    assert await asyncio.to_thread(pages.begun.acquire, timeout=DEADLINE_SECONDS)


def test_no_page_is_rendered_on_the_loop() -> None:
    """Neither the first one nor those after it, however short they were."""
    pages = Pages()
    route = metrics_route(lambda: (pages,))

    async def scene() -> None:
        pages.may_end.release(3)
        for _ in range(3):
            await scraped(route)

    asyncio.run(scene())
    assert threading.main_thread() not in pages.threads


def test_requests_while_a_page_is_rendered_share_the_next_one() -> None:
    """None of them gets the page that was begun before it asked."""
    pages = Pages()
    route = metrics_route(lambda: (pages,))

    async def scene() -> tuple[bytes, set[bytes]]:
        first = asyncio.create_task(scraped(route))
        await until_begun(pages)
        others = [asyncio.create_task(scraped(route)) for _ in range(50)]
        await asyncio.sleep(0)
        pages.may_end.release(len(others) + 1)
        return await first, set(await asyncio.gather(*others))

    first, others = asyncio.run(scene())
    assert b"page 1.0" in first
    assert len(others) == 1
    assert b"page 2.0" in others.pop()


def test_requests_that_share_a_page_get_it_one_by_one() -> None:
    """The loop turns between their answers, however many wait for it."""
    pages = Pages()
    route = metrics_route(lambda: (pages,))

    async def scene() -> int:
        turns, answered_in = 0, set[int]()

        async def answered() -> None:
            await scraped(route)
            answered_in.add(turns)

        waiting = [asyncio.create_task(answered()) for _ in range(50)]
        await until_begun(pages)
        pages.may_end.release()
        while not all(task.done() for task in waiting):
            await asyncio.sleep(0)
            turns += 1
        return len(answered_in)

    assert asyncio.run(scene()) == 50


def test_scrapers_of_different_formats_take_turns() -> None:
    """Each format is rendered once for all its requests, and no two at a time."""
    pages = Pages()
    route = metrics_route(lambda: (pages,))
    asked = 5 * sorted(CONTENT_TYPES)

    async def scene() -> None:
        scrapes = [asyncio.create_task(scraped(route, accept)) for accept in asked]
        await until_begun(pages)
        pages.may_end.release(len(asked))
        await asyncio.gather(*scrapes)

    asyncio.run(scene())
    assert not pages.has_two_at_once
    assert len(pages.threads) == len({format_for(accept).content_type for accept in asked})


def test_a_scraper_of_chosen_names_does_not_delay_the_whole_page() -> None:
    """Not even many of them, each with names of its own."""
    pages = Pages()
    route = metrics_route(lambda: (pages,))

    async def scene() -> bytes:
        chosen = [
            asyncio.create_task(scraped(route, query=f"name[]=page&name[]=x{number}"))
            for number in range(MAX_CHOSEN_PAGES)
        ]
        await until_begun(pages)
        whole = asyncio.create_task(scraped(route))
        await until_begun(pages)
        pages.may_end.release(MAX_CHOSEN_PAGES + 1)
        page = await whole
        await asyncio.gather(*chosen)
        return page

    assert b"page 2.0" in asyncio.run(scene())


def test_names_without_end_make_few_pages() -> None:
    """The whole page has what the scrapers beyond a few asked for, and all of them share it."""
    pages = Pages()
    route = metrics_route(lambda: (pages,))

    async def scene() -> list[bytes]:
        scrapes = [
            asyncio.create_task(scraped(route, query=f"name[]=page&name[]=x{number}"))
            for number in range(200)
        ]
        await until_begun(pages)
        pages.may_end.release(len(scrapes))
        return await asyncio.gather(*scrapes)

    assert all(b"page " in page for page in asyncio.run(scene()))
    # One or two whole pages, as some may ask only when the first has begun.
    assert len(pages.threads) <= MAX_CHOSEN_PAGES + 3


def test_names_that_are_waited_for_are_never_the_ones_too_many() -> None:
    """A scraper shares the page of its names, however many others wait."""
    pages = Pages()
    route = metrics_route(lambda: (pages, Named()))
    chosen = [f"name[]=named&name[]=x{number}" for number in range(MAX_CHOSEN_PAGES + 1)]

    async def scene() -> bytes:
        scrapes = [asyncio.create_task(scraped(route, query=chosen[0]))]
        await until_begun(pages)
        scrapes += [asyncio.create_task(scraped(route, query=query)) for query in chosen[1:]]
        await asyncio.sleep(0)
        last = asyncio.create_task(scraped(route, query=chosen[-1]))
        await asyncio.sleep(0)
        pages.may_end.release(len(scrapes) + 1)
        await asyncio.gather(*scrapes)
        return await last

    assert b"page " not in asyncio.run(scene())


class Named(Collector):
    """A registry with a series that is there at once."""

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("named", "Another one.", 1)


def test_pages_that_failed_before_they_began_take_no_room() -> None:
    """Nothing waits for them."""
    pages = Pages()
    route = metrics_route(lambda: (pages, Named()))
    pages.may_end.release()

    async def scene() -> bytes:
        size_bytes = threading.stack_size(1 << 46)  # more than there is room for
        try:
            for number in range(MAX_CHOSEN_PAGES):
                with pytest.raises(RuntimeError, match="thread"):
                    await scraped(route, query=f"name[]=x{number}")
        finally:
            threading.stack_size(size_bytes)
        return await scraped(route, query="name[]=named")

    assert b"page " not in asyncio.run(scene())


def test_a_scraper_that_goes_away_takes_the_page_from_nobody() -> None:
    """The requests that share it with the first one get it."""
    pages = Pages()
    route = metrics_route(lambda: (pages,))

    async def scene() -> bytes:
        first, second = (asyncio.create_task(scraped(route)) for _ in range(2))
        await until_begun(pages)
        first.cancel()
        await asyncio.wait({first})
        pages.may_end.release()
        return await second

    assert b"page 1.0" in asyncio.run(scene())


def test_the_next_page_may_succeed_where_no_thread_could_be_started() -> None:
    """A page that fails before it is begun is not waited for again."""
    pages = Pages()
    route = metrics_route(lambda: (pages,))
    pages.may_end.release()

    async def scene() -> bytes:
        size_bytes = threading.stack_size(1 << 46)  # more than there is room for
        try:
            with pytest.raises(RuntimeError, match="thread"):
                await scraped(route)
        finally:
            threading.stack_size(size_bytes)
        return await scraped(route)

    assert b"page 1.0" in asyncio.run(scene())


class Costly(Collector):
    """A registry with pages that take some processor time."""

    def __init__(self) -> None:
        self.processor_seconds = 0.0

    def collect(self) -> Iterator[Metric]:
        began_seconds = time.thread_time()
        while (taken_seconds := time.thread_time() - began_seconds) < 0.01:
            pass
        self.processor_seconds += taken_seconds
        yield GaugeMetricFamily("page", "A page.", 1)


def test_a_scraper_that_never_pauses_leaves_the_processor_to_others() -> None:
    """The interpreter rests after each page, for as long as it took several times over."""
    costly = Costly()
    route = metrics_route(lambda: (costly,))

    async def scene() -> float:
        began_seconds = time.monotonic()
        for _ in range(5):
            await scraped(route)
        taken_seconds = costly.processor_seconds
        await scraped(route)
        return (time.monotonic() - began_seconds) / taken_seconds

    assert asyncio.run(scene()) >= 1 + PAUSE_FACTOR


def test_requests_are_held_at_the_gate_and_behind_it() -> None:
    """Both are one number: no request is in both lines."""

    async def scene(harness: ReplayHarness) -> None:
        admission = Admission(
            View(), probe_token="", refusals=Refusals(), capacity=lambda: Capacity(1, 1)
        )
        view = LoadView(admission, lambda: Load(harness.requests.held))
        tickets = [admission.join(RequestContext(), work="engine") for _ in range(3)]
        assert request_counts(admission, None, view.now()) == RequestCounts(1, held=2, waiting=2)
        harness.start().hold()
        call = harness.call("a prompt")
        await harness.llm.until_received(1)
        harness.bury()
        await harness.until_held(1)
        assert request_counts(admission, harness.requests, view.now()).held == 2 + 1
        harness.start()
        await call
        counts = request_counts(admission, harness.requests, view.now())
        assert counts == RequestCounts(1, 2, 2, replayed=1, lost=harness.requests.lost)
        for ticket in tickets:
            admission.leave(ticket)

    run_scene(scene)
