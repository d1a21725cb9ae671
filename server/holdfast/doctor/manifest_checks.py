"""What is wrong with a container of a manifest? Pure functions of its record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from holdfast.doctor.checks import check_environment, shared_memory
from holdfast.doctor.command_line import UNKNOWN, known_arguments
from holdfast.doctor.deployments import Deployment
from holdfast.doctor.findings import Finding, HazardName, Severity, failure, ok, warning
from holdfast.doctor.gpu_checks import expandable_segments, gpu_count, or_fewer_ranks
from holdfast.doctor.parallelism import Layout
from holdfast.doctor.probe_checks import check_probes
from holdfast.engine.unsupported import REFUSED_VARIABLES, is_on
from holdfast.errors import UsageError
from holdfast.nodes.command_line import head_drain_seconds
from holdfast.settings import Settings
from holdfast.settings.variable_names import OUR_PREFIX

ENGINE_STOP_SECONDS = 30.0
"""The longest time that stopping the engine takes after the drain."""
_CERTAIN_HAZARDS: set[HazardName] = {"manifest", "plugins", "startup-plan", "variables"}
"""Hazards that fail whatever the unknown flags and variables are."""
KEEPS_ALIVE = "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH"
_LAYOUT_OF_FOLLOWER = Layout(tensor_parallel_size=2, nodes=2)
"""The least that an engine over several nodes has."""


def check_deployment(
    deployment: Deployment, layout: Layout, settings: Settings
) -> Iterator[Finding]:
    """Yield every finding about one container; `layout` and `settings` are its own flags."""
    for finding in _findings(deployment, layout, settings):
        yield as_seen(deployment, finding)


def as_seen(deployment: Deployment, finding: Finding) -> Finding:
    """Return a finding about the container; what an unknown value may avert is only a warning."""
    severity = finding.severity
    if not deployment.is_fully_known and finding.name not in _CERTAIN_HAZARDS:
        severity = min(severity, Severity.WARNING, key=[*Severity].index)
    return replace(finding, severity=severity, source=deployment.source)


def check_follower(deployment: Deployment) -> Iterator[Finding]:
    """Yield every finding about a container that runs `holdfast follow`."""
    for finding in _follower_findings(deployment):
        yield as_seen(deployment, finding)


def _findings(deployment: Deployment, layout: Layout, settings: Settings) -> Iterator[Finding]:
    if deployment.problem:
        yield _unread(deployment)
        return
    yield from _check_config_file(deployment)
    yield from _check_restart(deployment)
    yield from check_probes(deployment, settings)
    yield from _check_stop(deployment, settings.supervision.drain_timeout_seconds)
    yield from _check_shell(deployment)
    yield from _check_gpus(deployment, layout)
    yield from _check_shared_memory(deployment, layout)
    yield from _check_state(deployment, settings)
    if deployment.is_ours:
        ours = [name for name in deployment.unknown_variables if name.startswith(OUR_PREFIX)]
        yield from check_environment(
            {**dict.fromkeys(ours, UNKNOWN), **deployment.environment},
            is_demo="--demo" in deployment.arguments,
            unknown=[name for name in REFUSED_VARIABLES if deployment.may_have(name)],
        )
    yield expandable_segments(deployment.environment, layout, is_sure=False)


def _follower_findings(deployment: Deployment) -> Iterator[Finding]:
    if deployment.problem:
        yield _unread(deployment)
        return
    yield ok("manifest", "a follower: the head has its flags, so only stop and memory are checked")
    yield _stop_of_follower(deployment)
    yield from _check_shared_memory(deployment, _LAYOUT_OF_FOLLOWER)


def _unread(deployment: Deployment) -> Finding:
    return failure(
        "manifest",
        f"{deployment.problem}.",
        "check it with `docker compose config` or `kubectl apply --dry-run=server`.",
    )


def _check_config_file(deployment: Deployment) -> Iterator[Finding]:
    if any(word.partition("=")[0] == "--config" for word in deployment.arguments):
        yield warning(
            "manifest",
            "the flags in the --config file cannot be checked from here.",
            "run `holdfast doctor --config FILE` in the container.",
        )


def _check_restart(deployment: Deployment) -> Iterator[Finding]:
    name: HazardName = "restart-policy"
    restart = deployment.restart
    is_on_failure = restart.lower().replace("-", "").startswith("onfailure")
    if deployment.is_stock and is_on_failure:
        yield warning(
            name,
            f"{restart} with {deployment.image or 'vllm serve'}: vLLM exits with 0 when its engine "
            "dies (https://github.com/vllm-project/vllm/issues/48966), so nothing restarts it.",
            "run it with Holdfast: its exit code says what happened.",
        )
    elif not deployment.is_pod and restart in {"", "no"}:
        yield warning(name, "no restart policy.", "restart: on-failure:5")
    elif not deployment.is_pod and restart in {"always", "unless-stopped", "on-failure"}:
        yield warning(
            name,
            f"{restart} keeps restarting a server that cannot start; on unified memory, such a "
            "loop took hosts down (https://github.com/eugr/spark-vllm-docker/issues/257).",
            "restart: on-failure:5",
        )
    else:
        yield ok(name, restart or "the default of the workload")
    if deployment.is_stock and is_on(KEEPS_ALIVE, deployment.environment):
        yield warning(
            name,
            f"{KEEPS_ALIVE}: the server stays up when its engine is dead, so nothing restarts it.",
            "unset it, or run it with Holdfast.",
        )


def _check_stop(deployment: Deployment, drain_seconds: float) -> Iterator[Finding]:
    if deployment.is_stock:
        return
    name: HazardName = "stop-time-out"
    needed_seconds = deployment.pre_stop_seconds + drain_seconds + ENGINE_STOP_SECONDS
    terms = f"{drain_seconds:g} s to drain and {ENGINE_STOP_SECONDS:g} s to stop the engine"
    if deployment.pre_stop_seconds:
        terms = f"{deployment.pre_stop_seconds:g} s of preStop, {terms}"
    seen = f"killed after {deployment.stop_seconds:g} s; {terms} take {needed_seconds:g} s"
    remedy = f"{_stop_setting(deployment, needed_seconds)}, or a shorter --drain-timeout."
    if deployment.stop_seconds >= needed_seconds:
        yield ok(name, seen)
    elif deployment.stop_seconds <= deployment.pre_stop_seconds + drain_seconds:
        yield failure(name, f"{seen}: streams are cut off while they drain.", remedy)
    else:
        yield warning(name, f"{seen}: an engine that stops slowly is killed.", remedy)


def _stop_of_follower(deployment: Deployment) -> Finding:
    name: HazardName = "stop-time-out"
    drain_seconds = 0.0
    with suppress(UsageError):  # the follower itself says so
        known = known_arguments(deployment.arguments)
        drain_seconds = head_drain_seconds(known, deployment.environment)
    needed_seconds = deployment.pre_stop_seconds + drain_seconds + ENGINE_STOP_SECONDS
    seen = (
        f"killed after {deployment.stop_seconds:g} s; it needs up to {needed_seconds:g} s to stop"
    )
    if deployment.stop_seconds >= needed_seconds:
        return ok(name, seen)
    remedy = f"{_stop_setting(deployment, needed_seconds)}."
    if drain_seconds and deployment.stop_seconds <= deployment.pre_stop_seconds + drain_seconds:
        return warning(name, f"{seen}: its ranks are killed while the head drains.", remedy)
    return warning(name, f"{seen}: an engine that stops slowly is killed.", remedy)


def _stop_setting(deployment: Deployment, seconds: float) -> str:
    if deployment.is_pod:
        return f"terminationGracePeriodSeconds: {seconds:g}"
    return f"stop_grace_period: {seconds:g}s"


def _check_shell(deployment: Deployment) -> Iterator[Finding]:
    if shell := deployment.program.shell:
        yield warning(
            "entry-point",
            f"{shell} runs the server and does not pass SIGTERM on, so it does not drain.",
            "write the command as a list of words, or put `exec` before it.",
        )


def _check_gpus(deployment: Deployment, layout: Layout) -> Iterator[Finding]:
    if deployment.gpus is not None and deployment.gpus < layout.ranks and not layout.has_ray:
        yield failure(
            "gpu",
            f"{gpu_count(layout.ranks)} needed, {deployment.gpus} given to the container.",
            f"give the container more{or_fewer_ranks(layout)}.",
        )


def _check_shared_memory(deployment: Deployment, layout: Layout) -> Iterator[Finding]:
    if deployment.shared_bytes is None:
        yield ok("shared-memory", "the host's, or without a limit of its own")
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


def _check_state(deployment: Deployment, settings: Settings) -> Iterator[Finding]:
    if deployment.is_stock:
        return
    name: HazardName = "state-directory"
    lost = "what was learned is lost with the container"
    given = settings.workspace.learned_directory
    path = deployment.default_state_directory if given == "default" else given
    if path is None:
        yield warning(name, f"--learned-dir none: {lost}.", "name a directory on a volume.")
        return
    above = [mount for mount in deployment.mounts if path.is_relative_to(mount)]
    if not above:
        yield warning(name, f"no volume at {path}: {lost}.", f"mount a volume at {path}.")
    elif not deployment.mounts[max(above, key=len)]:
        yield warning(
            name,
            f"{path} is on scratch space or read-only: {lost}.",
            "use a claim or named volume, without `ro`.",
        )
    else:
        yield ok(name, f"{path} is on a volume")
