"""What is wrong with a deployment as a manifest asks for it? Pure functions of its record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePath

from holdfast.doctor.checks import check_environment
from holdfast.doctor.deployments import Deployment
from holdfast.doctor.findings import Finding, HazardName, failure, ok, warning
from holdfast.doctor.gpu_checks import expandable_segments
from holdfast.doctor.layout import Layout
from holdfast.doctor.shared_memory import shared_memory

ENGINE_STOP_SECONDS = 30.0
"""What stopping the engine takes after the drain, at most."""
SHORTEST_START_SECONDS = 60.0
"""No engine with a real model was seen to start faster."""
LIVENESS = "/livez"
STATE_DIRECTORY = Path("/home/holdfast/.local/state/holdfast")
"""Of our images."""
_SHELLS = {"sh", "bash", "dash"}


def check_deployment(
    deployment: Deployment,
    layout: Layout,
    *,
    drain_seconds: float,
    state_directory: PurePath | None,
) -> Iterator[Finding]:
    """Every finding about one container, with its own flags in `layout` and `drain_seconds`."""
    findings = [
        *_check_restart(deployment),
        *_check_liveness(deployment),
        *_check_stop(deployment, drain_seconds),
        *_check_shell(deployment),
        *_check_shared_memory(deployment, layout),
        *_check_state(deployment, state_directory),
    ]
    if deployment.is_ours:
        is_demo = "--demo" in deployment.arguments
        findings += check_environment(deployment.environment, is_demo=is_demo)
    findings.append(expandable_segments(deployment.environment, layout, is_sure=False))
    for finding in findings:
        yield replace(finding, source=deployment.source)


def _check_restart(deployment: Deployment) -> Iterator[Finding]:
    name: HazardName = "restart-policy"
    restart = deployment.restart
    is_on_failure = restart.lower().replace("-", "").startswith("onfailure")
    if deployment.is_stock and is_on_failure:
        yield warning(
            name,
            f"{restart} with {deployment.image or 'vllm serve'}: vLLM exits with 0 when its engine "
            "dies (https://github.com/vllm-project/vllm/issues/48966), so nothing restarts it.",
            "run it with Holdfast, whose exit code says what happened.",
        )
    elif not deployment.is_pod and restart in {"", "no"}:
        yield warning(name, "no restart policy.", "restart: on-failure:5")
    elif not deployment.is_pod and restart in {"always", "unless-stopped", "on-failure"}:
        yield warning(
            name,
            f"{restart} starts for ever what cannot start; on unified memory such a loop took "
            "hosts down (https://github.com/eugr/spark-vllm-docker/issues/257).",
            "restart: on-failure:5",
        )
    else:
        yield ok(name, restart or "that of the workload")


def _check_liveness(deployment: Deployment) -> Iterator[Finding]:
    name: HazardName = "liveness-probe"
    probe = deployment.liveness
    if probe is None:
        return
    if not probe.path or probe.path == LIVENESS:
        yield ok(name, probe.path or "no HTTP request")
        return
    seen = f"liveness asks {probe.path}, which is 503 while an engine starts, recovers or drains"
    remedy = f"ask {LIVENESS}, and give the start a startupProbe on /startupz."
    if deployment.startup is None and probe.budget_seconds < SHORTEST_START_SECONDS:
        yield failure(
            name,
            f"{seen}; without a startupProbe the container is killed after "
            f"{probe.budget_seconds:g} s, before it was ever ready.",
            remedy,
        )
    else:
        yield warning(name, f"{seen}: what would have recovered is killed.", remedy)


def _check_stop(deployment: Deployment, drain_seconds: float) -> Iterator[Finding]:
    if deployment.is_stock:
        return
    name: HazardName = "stop-time-out"
    needed_seconds = deployment.pre_stop_seconds + drain_seconds + ENGINE_STOP_SECONDS
    terms = f"{drain_seconds:g} s to drain and {ENGINE_STOP_SECONDS:g} s to stop the engine"
    if deployment.pre_stop_seconds:
        terms = f"{deployment.pre_stop_seconds:g} s of preStop, {terms}"
    seen = f"killed after {deployment.stop_seconds:g} s; {terms} are {needed_seconds:g} s"
    key = "terminationGracePeriodSeconds" if deployment.is_pod else "stop_grace_period"
    value = f"{needed_seconds:g}" if deployment.is_pod else f"{needed_seconds:g}s"
    remedy = f"{key}: {value}, or a shorter --drain-timeout."
    if deployment.stop_seconds >= needed_seconds:
        yield ok(name, seen)
    elif deployment.stop_seconds <= deployment.pre_stop_seconds + drain_seconds:
        yield failure(name, f"{seen}: streams that drain are cut off.", remedy)
    else:
        yield warning(name, f"{seen}: an engine that stops slowly is killed.", remedy)


def _check_shell(deployment: Deployment) -> Iterator[Finding]:
    words = deployment.command
    if not words or PurePath(words[0]).name not in _SHELLS:
        return
    script = words[-1].strip()
    if script.startswith("exec ") or "; exec " in script or "&& exec " in script:
        return
    yield warning(
        "entry-point",
        f"{words[0]} stands before the server and does not pass SIGTERM on: nothing drains.",
        "give the command as a list of words, or put `exec` before it.",
    )


def _check_shared_memory(deployment: Deployment, layout: Layout) -> Iterator[Finding]:
    if deployment.shared_bytes is None:
        yield ok("shared-memory", "that of the host, or without a limit of its own")
        return
    remedy = (
        "mount an emptyDir with `medium: Memory` at /dev/shm."
        if deployment.is_pod
        else "ipc: host, or shm_size: 16gb."
    )
    yield shared_memory(
        deployment.shared_bytes,
        layout,
        deployment.environment,
        is_cpu_build=deployment.is_cpu_build,
        remedy=remedy,
    )


def _check_state(deployment: Deployment, path: PurePath | None) -> Iterator[Finding]:
    if deployment.is_stock:
        return
    name: HazardName = "state-directory"
    lost = "what was learned is forgotten with the container"
    if path is None:
        yield warning(name, f"--learned-dir none: {lost}.", "name a directory on a volume.")
        return
    above = [mount for mount in deployment.mounts if path.is_relative_to(mount)]
    if not above:
        yield warning(name, f"no volume at {path}: {lost}.", f"mount a volume at {path}.")
    elif not deployment.mounts[max(above, key=len)]:
        yield warning(name, f"{path} is on scratch space: {lost}.", "use a claim or named volume.")
    else:
        yield ok(name, f"{path} is on a volume")
