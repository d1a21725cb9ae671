"""More than one rank, and a rank that says nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from servers import SMALL, Server, running

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("demo")]


TWO_RANKS = ("--tensor-parallel-size=2",)
BIND = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
PROMPTS = ("hold fast", "0123456789" * 200)


def test_two_ranks_report_and_answer_alike(demo: Server, tmp_path: Path) -> None:
    """With TP=2 both ranks stand on `/metrics`, and the tokens are those of one rank."""
    flags = ("--demo", *SMALL, "--dtype=float32", *TWO_RANKS)
    with running(tmp_path, *flags, environment=BIND) as server:
        server.until_ready()
        for rank in ("0", "1"):
            assert server.metric("workspace_reserved_bytes", rank=rank) > 0
            assert server.metric("workspace_locked", rank=rank) == 1
            assert server.metric("engine_steps_total", rank=rank) > 0
        assert server.metric("engine_steps_total", rank="0") == server.metric(
            "engine_steps_total", rank="1"
        )
        for prompt in PROMPTS:
            options = {"max_tokens": 24, "return_token_ids": True, "ignore_eos": True}
            alone, together = (s.completion(prompt, **options).json() for s in (demo, server))
            assert together["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]


def test_plugin_left_out_is_no_false_green(tmp_path: Path) -> None:
    """VLLM_PLUGINS without us: exit 3, and the last line says why."""
    environment = {"VLLM_PLUGINS": "something_else"}
    with running(tmp_path, "--demo", *SMALL, environment=environment) as server:
        assert server.wait() == 3
        assert "VLLM_PLUGINS=something_else leaves out holdfast" in server.last_line
        assert "Remedy: add holdfast" in server.last_line
