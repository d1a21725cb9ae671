"""The page as text says what the page says, and nothing of it is interpreted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from holdfast.status_page.screen import MAX_SHOWN_ROWS, TEXT_COLUMNS, as_text, screen

NOW = datetime(2026, 11, 23, 21, 40, tzinfo=UTC).timestamp()
MIB = 1024 * 1024
READY: dict[str, Any] = {
    "state": "READY",
    "reason": "2048 tokens proven",
    "since": "2026-11-23T21:02:03.000+00:00",
    "server": {"model": "demo", "versions": {"holdfast": "0.1.0", "vllm": "0.32.0"}},
    "engine": {"generation": 2, "restarts_left": 1},
    "nodes": {"left": {"is_joined": True}, "right": {"is_joined": False, "problem": "gone"}},
    "host_memory": {"available_bytes": 512 * MIB, "total_bytes": 2048 * MIB},
    "ranks": {
        "0/10": {"slots": {}, "memory": {"weights_bytes": 1}},
        "0/2": {
            "kv_used_ratio": 0.5,
            "growth_limit_bytes": 48 * MIB,
            "retired_bytes": 7 * MIB,
            "rejections": {"scratch": 2, "permute": 1},
            "fatal_error": "CUDA error: an illegal address",
            "memory": {"weights_bytes": 100 * MIB, "total_bytes": 400 * MIB},
            "slots": {
                "0/0": {
                    "size_bytes": 24 * MIB,
                    "high_water_bytes": 12 * MIB,
                    "reserved_bytes": 22 * MIB,
                }
            },
        },
    },
    "requests": {
        "running": 1,
        "waiting": 0,
        "held": 2,
        "replayed": 1,
        "refused": {"overloaded": 3},
        "lost": {},
        "rows": {
            "17": {
                "stage": "prefill",
                "received": "2026-11-23T21:39:30.000+00:00",
                "prompt_tokens": 32000,
                "prefilled_tokens": 16000,
                "output_tokens": 0,
                "key": "team-a",
                "replays": 1,
            }
        },
    },
    "probe": {
        "suite": "worst-case",
        "passed": True,
        "limited": True,
        "proven_tokens": 2048,
        "steps": [{"name": "full_context", "outcome": "passed", "tokens": 2048}],
    },
    "proof": {
        "nan_rows": 3,
        "baseline": {"canary": {"agrees": False}},
        "verify": {"verdict": "passed", "profile": "full", "passed": 40, "failed": 0},
    },
    "timeline": {
        "9": {"at": "2026-11-23T21:01:00.000+00:00", "kind": "death", "cause": "stall"},
        "10": {"at": "2026-11-23T21:02:03.000+00:00", "kind": "state", "state": "READY"},
        "11": {
            "at": "2026-11-23T21:03:00.000+00:00",
            "kind": "growth",
            "ranks": [0, 1],
            "phase": "locked",
            "growths": 5,
        },
    },
}


def text_of(document: dict[str, Any]) -> str:
    """The text, with single spaces, as columns depend on each other."""
    lines = as_text(document, NOW).splitlines()
    return "\n".join(" ".join(line.split()) for line in lines)


@pytest.mark.parametrize(
    "line",
    [
        "READY for 37 min 57 s: 2048 tokens proven",
        "demo, generation 2, restarts left: 1, Holdfast 0.1.0, vLLM 0.32.0",
        "0/2 weights #####............... 100.0 MiB",
        "0/2 slot 0/0 ##########.......... 24.0 MiB 12.0 MiB 22.0 MiB",
        "0/2 retired 7.0 MiB",
        "0/2 may grow by 48.0 MiB",
        "rank 0/2: 3 rejections",
        "rank 0/2 is lost: CUDA error: an illegal address",
        "node right is missing: gone",
        "2026-11-23 21:03:00 growth locked 5 on 2 ranks",
        "0/2 KV in use ##########.......... 50%",
        "host: 512.0 MiB of 2.0 GiB left",
        "1 running, 0 waiting, 2 held; 1 replayed, ? continued, 3 refused (overloaded 3), 0 lost",
        "17 prefill 30 s 16,000/32,000 ##########.......... 0 team-a ? 1",
        "proof: worst-case passed, limited, 2,048 tokens proven",
        "3 rows of logits with a NaN",
        "verify full: passed, 40 passed, 0 failed, ? inconclusive",
        "baseline: the canary differs",
        "2026-11-23 21:01:00 death stall",
    ],
)
def test_every_band_is_there(line: str) -> None:
    """With its numbers in units that people read."""
    assert line in text_of(READY).splitlines()


def test_ranks_and_events_are_in_the_order_of_their_numbers() -> None:
    """The newest event first; rank 10 comes after rank 2."""
    text = text_of(READY)
    assert text.index("0/2 weights") < text.index("0/10 weights")
    assert text.index("state READY") < text.index("death stall")


def test_a_start_says_what_it_does_and_how_long_it_takes() -> None:
    """While it is expected to take any longer."""
    start = {
        "state": "PROBING",
        "reason": "running the suite",
        "activity": {"phase": "probe", "step": "context_sweep", "detail": "2 of 3"},
        "ready_expected": "2026-11-23T21:41:05.000+00:00",
    }
    assert (
        "now: probe, context_sweep, 2 of 3; READY expected in 1 min 5 s"
        in text_of(start).splitlines()
    )


def test_a_start_that_takes_longer_is_overdue() -> None:
    """It is not expected any more."""
    start = {
        "state": "STARTING",
        "reason": "loading",
        "ready_expected": "2026-11-23T21:39:00+00:00",
    }
    assert "READY is 1 min 0 s overdue" in text_of(start)


def test_one_request_proves_no_tokens() -> None:
    """It shows a proven engine again."""
    event = {"at": "2026-11-23T21:01:00+00:00", "kind": "probe", "passed": True, "proven_tokens": 0}
    assert "probe passed one request" in text_of({"timeline": {"1": {**event, "is_whole": False}}})
    assert "probe passed 0 tokens proven" in text_of(
        {"timeline": {"1": {**event, "is_whole": True}}}
    )


def test_a_small_terminal_shows_the_newest_events_and_every_band() -> None:
    """With a proof of many steps, many ranks and many requests."""
    steps = [{"name": f"step{number}", "outcome": "passed"} for number in range(12)]
    report = {
        **READY,
        "ranks": {f"0/{rank}": READY["ranks"]["0/2"] for rank in range(16)},
        "requests": {"rows": {str(number): {"stage": "decode"} for number in range(30)}},
        "probe": {**READY["probe"], "steps": [*steps, {"name": "bad", "outcome": "failed"}]},
    }
    console = Console(width=TEXT_COLUMNS, record=True, file=StringIO())
    console.print(screen(report, NOW, lines=24))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert any("death stall" in line for line in lines[:12])
    assert "and 13 more" in lines
    assert "and 27 more" in lines
    assert any(line.startswith("proof: ") for line in lines[:24])
    assert any(line.startswith("bad failed") for line in lines)
    assert not any(line.startswith("step0") for line in lines)


def test_further_requests_are_counted() -> None:
    """Those that the screen has no room for, and those that the server left out."""
    rows = {str(number): {"stage": "decode"} for number in range(MAX_SHOWN_ROWS + 2)}
    assert "and 7 more" in text_of({"requests": {"rows": rows, "rows_left_out": 5}})


@pytest.mark.parametrize("lines", [24, 60])
def test_on_a_terminal_the_requests_are_seen(lines: int) -> None:
    """With many ranks, memory has a line for each; otherwise each part has one."""
    ranks = {f"0/{rank}": READY["ranks"]["0/2"] for rank in range(lines // 8)}
    console = Console(width=TEXT_COLUMNS, record=True, file=StringIO())
    console.print(screen({**READY, "ranks": ranks}, NOW, lines=lines))
    text = " ".join(console.export_text().split())
    assert (
        f"0/{len(ranks) - 1} ######.............. 124.0 MiB of 400.0 MiB 24.0 MiB 48.0 MiB 50%"
        in text
    )
    assert "slot 0/0" not in text
    console.print(screen(READY, NOW, lines=2 * lines))
    assert "slot 0/0" in console.export_text()


def test_nothing_is_interpreted() -> None:
    """Neither rich's markup nor the control characters of a terminal."""
    document = {"state": "READY", "reason": "[red]\x1b[2J\x07 see [link=http://x]here[/link]"}
    text = as_text(document, NOW)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]" in text
    assert "[link=http://x]here[/link]" in text


def _places(document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    for name, value in document.items():
        yield document, name
        if isinstance(value, dict):
            yield from _places(value)


NAMES = sorted({name for holder, name in _places(READY)})
ANYTHING = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.sampled_from([10**400, -(10**4200), "9" * 5000, "x" * 5000]),
        st.floats(allow_nan=True),
        st.text(),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(st.sampled_from([*NAMES, "9" * 5000]), inner, max_size=3),
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted(READY)), ANYTHING))
def test_any_document_can_be_shown(document: dict[str, Any]) -> None:
    """It may come from another program."""
    assert as_text(document, NOW)


@given(st.data())
def test_any_value_may_be_anything(data: st.DataObject) -> None:
    """In the midst of a document that is right otherwise."""
    document = json.loads(json.dumps(READY))
    places = list(_places(document))
    holder, name = data.draw(st.sampled_from(places))
    holder[name] = data.draw(ANYTHING)
    assert as_text(document, NOW)
    assert screen(document, NOW, lines=1)
