"""What is learned from a probe that made a workspace grow, and what is done with it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from servers import KV_CACHE_BYTES, SMALL, Server, running

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("learned")]


MIB = 1024 * 1024


def test_first_start_restarts_once_and_then_nothing_grows(first_start: Server) -> None:
    """The probe makes it grow, the engine is started once more, and READY has zero growth."""
    assert first_start.metric("engine_starts_total") == 2
    assert first_start.metric("engine_generation") == 2
    assert first_start.metric("workspace_growths_total", phase="locked") > 0, (
        "of the first generation"
    )
    (rank,) = first_start.status["workspace"]
    assert rank["growths"] == {"warmup": 0, "sealed": 0, "locked": 0}
    assert rank["rejections"] == {"scratch": 0, "persistent": 0, "permute": 0}


def test_reservation_is_no_blanket(first_start: Server) -> None:
    """Once learned, reserved stays within 1.1 x high water + 2 MiB."""
    (slot,) = first_start.status["workspace"][0]["slots"]
    assert slot["high_water_bytes"] > MIB
    assert slot["reserved_bytes"] >= slot["high_water_bytes"]
    assert slot["reserved_bytes"] <= 1.1 * slot["high_water_bytes"] + 2 * MIB


def test_kv_blocks_fall_by_what_was_reserved(first_start: Server, silent_demo: Path) -> None:
    """The second generation has as many KV blocks less as the reservation takes."""
    blocks = _kv_blocks(first_start)
    block_bytes = _block_bytes(silent_demo)
    reserved_bytes = int(first_start.metric("workspace_reserved_bytes"))
    assert blocks == [
        KV_CACHE_BYTES // block_bytes,
        (KV_CACHE_BYTES - reserved_bytes) // block_bytes,
    ]


def test_second_start_knows_and_does_not_restart(first_start: Server, second_start: Server) -> None:
    """With what the first start learned, one start of the engine is enough."""
    assert second_start.metric("engine_starts_total") == 1
    assert second_start.metric("workspace_growths_total") == 0
    reserved_bytes = first_start.metric("workspace_reserved_bytes")
    assert second_start.metric("workspace_reserved_bytes") == reserved_bytes


def test_deny_without_learning_fails_and_names_the_caller(
    silent_demo: Path, tmp_path: Path
) -> None:
    """Exit 4, and the last line names the caller, the bytes needed and the bytes held."""
    flags = ("--workspace-growth=deny", "--learned-dir=none")
    with running(tmp_path, str(silent_demo), *SMALL, *flags) as server:
        assert server.wait() == 4
        assert "Traceback" not in server.log
        last = server.last_line
    assert last.startswith("holdfast: error: the probe failed in ")
    assert re.search(r"model\.py:\d+:_staged", last)
    assert re.search(r"needed \d+ bytes, held \d+ bytes", last)
    assert "Remedy: " in last


def _kv_blocks(server: Server) -> list[int]:
    tokens = re.findall(r"KV cache size: ([\d,]+) tokens", server.log)
    return [int(count.replace(",", "")) // _BLOCK_TOKENS for count in tokens]


_BLOCK_TOKENS = 128
"""vLLM's default on the CPU."""


def _block_bytes(model: Path) -> int:
    """Keys and values of every layer and head for one block, in bfloat16."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    heads, layers = config["num_key_value_heads"], config["num_hidden_layers"]
    return int(2 * layers * heads * head_size * 2 * _BLOCK_TOKENS)
