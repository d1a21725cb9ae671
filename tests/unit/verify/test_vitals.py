"""What a page of metrics says of a server's health."""

from __future__ import annotations

import asyncio

import pytest

from asgi_server import serving
from double_limits import AlternatingDouble
from holdfast.verify.target import Target
from holdfast.verify.vitals import Vitals, ask_vitals, read_vitals


def test_half_of_the_memory_is_no_sample() -> None:
    """While Holdfast has no engine; other servers have only the one half."""
    page = "process_resident_memory_bytes 5.0\nother 7\n"
    engine = "holdfast_engine_host_memory_bytes 4.0\n"
    assert read_vitals(page, is_holdfast=True) == Vitals()
    assert read_vitals(page, is_holdfast=False) == Vitals(5.0)
    assert read_vitals(page + engine, is_holdfast=True) == Vitals(9.0)


def test_an_engine_that_an_operator_restarts_does_not_count() -> None:
    """Any other end does."""
    name = "holdfast_engine_deaths_total"
    page = f'{name}{{cause="stall"}} 2.0\n{name}{{cause="requested"}} 5.0\n'
    assert read_vitals(page, is_holdfast=True) == Vitals(deaths=2.0)


def test_a_brace_that_is_not_closed_ends_with_its_line() -> None:
    """The next line has its own sample, and a page of such lines is not read again for each."""
    page = "a{\nprocess_resident_memory_bytes 5.0\nb{} 2\n"
    assert read_vitals(page, is_holdfast=False) == Vitals(5.0)


def test_the_start_of_the_server_is_told() -> None:
    """Its counts begin there."""
    page = "process_start_time_seconds 1.75e+09\n"
    assert read_vitals(page, is_holdfast=True) == Vitals(started_at_seconds=1.75e9)


PRIORITIES = """\
sglang:num_running_reqs{model_name="m",priority=""} 3.0
sglang:num_running_reqs{model_name="m",priority="0"} 1.0
sglang:num_running_reqs{model_name="m",priority="7"} 2.0
sglang:num_queue_reqs{priority="",model_name="m"} 1.0
sglang:num_queue_reqs{priority="7",model_name="m"} 1.0
"""
"""Of SGLang with `--enable-priority-scheduling`."""


@pytest.mark.parametrize(
    ("page", "requests", "engines"),
    [
        ('vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_waiting 3.0\n', 5.0, 1),
        (
            'vllm:num_requests_running{engine="0"} 2\nvllm:num_requests_running{engine="1"} 1\n',
            3.0,
            2,
        ),
        ("sglang:num_running_reqs 0.0\nsglang:num_queue_reqs 4.0\n", 4.0, 1),
        (PRIORITIES, 4.0, 1),
        ('vllm:num_requests_running{server="http://engine:8000"} 4.0\n', None, 0),
        ("vllm:num_requests_running_ever 9.0\n", None, 0),
        ("vllm:num_requests_running NaN\n", None, 0),
    ],
)
def test_requests_that_run_and_wait_are_counted(
    page: str, requests: float | None, engines: int
) -> None:
    """Those of all engines, as vLLM and SGLang tell them."""
    assert read_vitals(page, is_holdfast=False) == Vitals(requests=requests, engines=engines)


def test_a_limit_of_requests_is_waited_for() -> None:
    """The page says nothing of the server before."""
    app = AlternatingDouble()
    app.limited = ("/metrics",)

    async def asked() -> Vitals:
        async with serving(app) as client, Target(str(client.base_url)) as target:
            return await ask_vitals(target, is_holdfast=False)

    assert asyncio.run(asked()) == Vitals(deaths=0.0, requests=0.0, engines=1)
