"""Reports of `holdfast verify` on one server, for tests that compare them."""

from __future__ import annotations

from holdfast.configuration_record import Configuration, ModelFile
from holdfast.verify.records import (
    CheckResult,
    CheckStatus,
    HoldfastFacts,
    Number,
    Report,
    Server,
    Tool,
    Verdict,
)

SERVED = Configuration(
    versions={"torch": "2.13.0"},
    flags=("org/model", "--max-model-len", "4096", "--enforce-eager", "--seed=-1"),
    variables={"VLLM_USE_V1": "1"},
    devices=("NVIDIA GB10",),
    files=(ModelFile("config.json", 700, "ab" * 32, "holdfast"),),
)
PROOF = {"passed": True, "limited": False, "proven_tokens": 4096}
SERVER = Server(
    url="http://spark:8000",
    model="org/model",
    models=("org/model",),
    max_model_len=4096,
    owner="vllm",
    vllm="0.32.0",
    abilities=("chat",),
    routes=("/v1/models",),
    holdfast=HoldfastFacts("READY", PROOF, 1, 0, 0, 0, 0),
    configuration=SERVED,
)


def check(
    name: str, status: CheckStatus = CheckStatus.PASSED, *numbers: Number, why: str = ""
) -> CheckResult:
    """The result of a check of the group `wire`."""
    return CheckResult(name, "wire", "Something.", status, why, numbers=numbers)


def report(*checks: CheckResult, server: Server = SERVER) -> Report:
    """A report of these checks."""
    return Report(
        tool=Tool("1.0", {}),
        profile="quick",
        started_at="2026-11-23T11:00:00+00:00",
        duration_seconds=1.0,
        server=server,
        verdict=Verdict.PASSED,
        reason="every check that ran passed",
        is_interrupted=False,
        checks=checks,
    )
