"""Each step of the probe finds what no other finds; a limited proof is told from a whole one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import probe_lab
from holdfast.demo.switches import DemoFault, DemoSwitches
from killed_probe import kill_during_last
from servers import SMALL, Server, running, sooner
from untrained import untrained_demo

pytestmark = [pytest.mark.engine, pytest.mark.own_engines]

LAB_DEADLINE_SECONDS = 480


@pytest.mark.timeout(600)
def test_each_step_meets_its_own_fault_and_no_other_half_does(tmp_path: Path) -> None:
    """What breaks in one kind of engine step is met by the step that is there for it."""
    lab = subprocess.run(
        [sys.executable, probe_lab.__file__, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=LAB_DEADLINE_SECONDS,
        check=False,
        env={**os.environ, **sooner()},
    )
    assert lab.returncode == 0, lab.stderr[-4000:]
    runs = json.loads(lab.stdout.rstrip().rpartition("\n")[2])
    assert len(runs) == 4
    for steps, met in runs:
        # `first_token` proves template, tokenizer and streaming, which the model does not see.
        assert set(met) == set(steps) - {"first_token"}


def test_slow_engine_has_a_limited_proof_which_may_be_refused(tmp_path: Path) -> None:
    """Sizes that cannot be finished in time are left out; --probe-require-full then exits 4."""
    slow = DemoFault("step_tokens", 17, "slow", seconds=0.25)
    model = untrained_demo(tmp_path, DemoSwitches(faults=(slow,)))
    flags = ("--max-num-batched-tokens=64", "--probe-timeout=8", "--probe-require-full")
    with running(tmp_path, str(model), *SMALL, *flags) as server:
        assert server.wait() == 4
        assert "the proof is limited to" in server.last_line
        assert "--probe-timeout" in server.last_line


@pytest.mark.shares_engine("learned")
def test_never_proves_again_in_the_same_engine_but_not_what_the_journal_forbids(
    first_start: Server, silent_demo: Path, learned_state: Path, tmp_path: Path
) -> None:
    """Without the restart a second pass shows no growth; a size in the journal is not tried again.

    Both in one start: the journal of the first start says that its longest context never ended.
    The probe needs more connections than clients may have.
    """
    assert first_start.process.poll() is None
    _forbid(learned_state, tmp_path, tokens=2000)
    flags = ("--learned-restart=never", "--max-connections=1")
    with running(tmp_path, str(silent_demo), *SMALL, *flags) as server:
        server.until_ready()
        assert server.metric("engine_starts_total") == 1
        assert server.metric("workspace_growths_total", phase="locked") > 0
        assert server.metric("probe_runs_total", result="passed") == 2
        probe = server.status["probe"]
        assert probe["limited"]
        assert 1000 <= probe["proven_tokens"] < 2000
        (slot,) = server.status["workspace"][0]["slots"]
        assert slot["high_water_bytes"] < 2000 * 1024
        assert "limited" in server.get("/readyz").json()["reason"]
        _no_longer_request_is_taken(server, probe["proven_tokens"])


def _no_longer_request_is_taken(server: Server, proven_tokens: int) -> None:
    """What was proven is served; a longer prompt is vLLM's own 400, a longer answer is cut."""
    assert server.get("/v1/models").json()["data"][0]["max_model_len"] == proven_tokens + 1
    prompt = [7] * proven_tokens
    answer = server.completion(prompt, max_tokens=8, ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] == 1
    assert server.completion([7, *prompt], max_tokens=1).status_code == 400
    refused = server.completion([7, 7, *prompt], max_tokens=1)
    assert refused.status_code == 400
    assert "context length" in refused.json()["error"]["message"]


def _forbid(source: Path, target: Path, *, tokens: int) -> None:
    """Leave an attempt that never ended, at the model that `source` has learned from."""
    (learned,) = source.glob("state/holdfast/workspace-*.json")
    fingerprint = learned.stem.removeprefix("workspace-")
    kill_during_last(target / "state" / "holdfast", fingerprint, tokens)
