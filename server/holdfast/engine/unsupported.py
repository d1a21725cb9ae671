"""Refuses flags and variables that ask for what Holdfast cannot do.

Most are refused before vLLM is imported, which takes seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import suppress
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from holdfast.errors import HoldfastError, PluginMissingError, UsageError
from holdfast.settings import ProbeSettings, flags
from holdfast.versions import INSTALL_VLLM

_PREFIX = "VLLM_"
_MEANT_EMPTY = "VLLM_PLUGINS"
"""Empty, it leaves out every plugin, including ours: `refuse_environment` looks at it."""


def is_on(name: str, environment: Mapping[str, str]) -> bool:
    """Whether a variable that is 0 or 1 switches something on."""
    return environment.get(name, "0") not in {"", "0"}


def drop_empty(environment: MutableMapping[str, str]) -> None:
    """Remove vLLM's variables that are empty: Compose passes on in this way what is not set.

    vLLM would read a number from some, and treats the others as if they were not set.
    """
    for name in list(environment):
        if name.startswith(_PREFIX) and name != _MEANT_EMPTY and not environment[name]:
            del environment[name]


def check_variables(environment: Mapping[str, str]) -> None:
    """Have vLLM read each of its variables that is set. Imports parts of vLLM.

    Raises:
        UsageError: it cannot read one.
    """
    from vllm import envs  # noqa: PLC0415 - imports torch

    for name, read in envs.environment_variables.items():
        if name not in environment:
            continue
        try:
            read()
        except (ValueError, TypeError, KeyError, OSError) as error:
            raise UsageError(
                f"the variable {name} has an invalid value: {error}.",
                remedy="correct it, or unset it.",
            ) from error


UNSUPPORTED = {
    "--grpc": "",
    "--data-parallel-external-lb": "-dpe",
    "--data-parallel-rank": "-dpn",
    "--data-parallel-hybrid-lb": "-dph",
    "--data-parallel-start-rank": "-dpr",
    "--data-parallel-multi-port-external-lb": "-dpm",
}
"""Flags of `vllm serve` for layouts in which no front end sees the whole engine, with their short
forms."""
UNSUPPORTED_SWITCHES = {
    "--enable-elastic-ep": "an engine that changes its size warms up again while it serves, and "
    "nothing proves what it can do after that",
    "--enable-fault-tolerance": "vLLM keeps a failed engine until it gets an instruction, and only "
    "with an external load balancer; Holdfast replaces the engine",
}
"""More flags, each with the reason. The last is new in vLLM 0.33."""
REFUSED_VARIABLES = ("VLLM_PLUGINS", "VLLM_ENABLE_STARTUP_PLAN")
"""What `refuse_environment` checks."""
_OLD_RAY_EXECUTOR = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"
_LIKENESS = 0.9
"""How similar a mistyped flag is to what was meant; no flag of vLLM is this similar to ours."""


def refuse_missing_vllm() -> None:
    """Check that vLLM is installed; its package name depends on the build.

    Raises:
        UsageError: it is not installed.
    """
    if find_spec("vllm") is None:
        raise UsageError("vLLM is not installed.", remedy=f"{INSTALL_VLLM}.")


_PLUGINS = {"holdfast": "report its workspaces", "holdfast_demo": "know the demo model"}
"""What each plugin does in a rank."""


def refuse_environment(environment: Mapping[str, str], *, is_demo: bool) -> None:
    """Check the variables with which READY would not be true.

    Raises:
        PluginMissingError: VLLM_PLUGINS leaves out what Holdfast needs in every rank.
        UsageError: another variable asks for what Holdfast cannot do.
    """
    if "VLLM_PLUGINS" in environment:
        named = environment["VLLM_PLUGINS"].split(",")
        needed = ("holdfast", "holdfast_demo") if is_demo else ("holdfast",)
        if missing := [name for name in needed if name not in named]:
            lost = " or ".join(_PLUGINS[name] for name in missing)
            raise PluginMissingError(
                f"VLLM_PLUGINS={environment['VLLM_PLUGINS']} leaves out {' and '.join(missing)}, "
                f"so no rank would {lost}.",
                remedy=f"add {','.join(missing)} to VLLM_PLUGINS, or unset it.",
            )
    if is_on("VLLM_ENABLE_STARTUP_PLAN", environment):
        raise UsageError(
            "VLLM_ENABLE_STARTUP_PLAN reuses a KV cache size that was measured without the "
            "reserved workspaces.",
            remedy="unset it.",
        )


def refuse_mistyped(arguments: Iterable[str]) -> None:
    """Check the flags that our parser does not know, most of them vLLM's.

    Raises:
        UsageError: one is almost one of ours, but not its beginning.
    """
    ours = [flag.name for flag in flags()]
    for argument in arguments:
        name = argument.partition("=")[0]
        if not name.startswith("--") or any(flag.startswith(name) for flag in ours):
            continue
        if meant := get_close_matches(name, ours, 1, _LIKENESS):
            raise UsageError(f"{name} is not a flag.", remedy=f"did you mean {meant[0]}?")


def refuse_repeated_keys(arguments: Iterable[str]) -> None:
    """Check the command line, without the file whose flags it replaces.

    Raises:
        UsageError: a flag of keys is repeated. The last would replace the others, which nothing
            would hide: `ps` would show them.
    """
    names = [argument.partition("=")[0].replace("_", "-") for argument in arguments]
    for flag in ("--api-key", *(flag.name for flag in flags() if flag.is_secret)):
        if names.count(flag) > 1:
            raise UsageError(
                f"{flag}: given more than once.",
                remedy=f"give it once; a file of keys ({flag}-file) may contain several.",
            )


def refuse_unsupported(namespace: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Check the flags as read by our parser or by vLLM's.

    Raises:
        UsageError: one asks for what Holdfast cannot do.
    """
    for flag in UNSUPPORTED:
        value = getattr(namespace, _destination(flag))
        if value is not None and value is not False:
            raise UsageError(
                f"{flag} is not supported: one front end must own the HTTP port and the whole "
                "engine, so that its READY covers all of it.",
                remedy=f"leave out {flag}, or use `vllm serve` for that layout.",
            )
    if namespace.api_server_count not in {None, 1}:
        raise UsageError(
            f"--api-server-count {namespace.api_server_count} is not supported: "
            "one front end supervises the engine.",
            remedy="leave out --api-server-count.",
        )
    refuse_nodes(
        nodes=namespace.nnodes,
        replicas=namespace.data_parallel_size,
        local_replicas=namespace.data_parallel_size_local,
    )
    for flag, reason in UNSUPPORTED_SWITCHES.items():
        if getattr(namespace, _destination(flag), False):
            raise UsageError(
                f"{flag} is not supported: {reason}.",
                remedy=f"leave out {flag}, or use `vllm serve` for it.",
            )
    has_ray = "ray" in {namespace.distributed_executor_backend, namespace.data_parallel_backend}
    if has_ray and namespace.nnodes > 1:
        raise UsageError(
            f"--nnodes {namespace.nnodes} is not supported with Ray, which chooses the nodes "
            "itself.",
            remedy="use --distributed-executor-backend mp, or leave out --nnodes.",
        )
    if has_ray and environment.get(_OLD_RAY_EXECUTOR, "1").strip() == "0":
        raise UsageError(
            f"{_OLD_RAY_EXECUTOR}=0 is not supported: that executor bypasses the worker, so "
            "Holdfast would see no step of the engine.",
            remedy=f"unset {_OLD_RAY_EXECUTOR}.",
        )


def refuse_no_proof(probe: ProbeSettings) -> None:
    """Check what has to be proven.

    Raises:
        UsageError: the whole proof is required, and there is none.
    """
    if probe.suite == "off" and probe.requires_full:
        raise UsageError(
            "`--probe off` proves nothing, so --probe-require-full cannot hold.",
            remedy="leave out one of them.",
        )


def refuse_nodes(*, nodes: int, replicas: int, local_replicas: int | None) -> None:
    """Check where the replicas would run; `local_replicas` of None means all of them here.

    Several nodes run one replica together. Its ranks agree on their reservations and report to one
    front end, which a replica on another node would not do.

    Raises:
        UsageError: a replica would run on several nodes beside others, or on another node.
    """
    if nodes > 1 and replicas > 1:
        raise UsageError(
            f"--nnodes {nodes} is not supported with --data-parallel-size {replicas}: several "
            "nodes run one replica together.",
            remedy="leave out one of them, or run a server for each replica behind a load "
            "balancer.",
        )
    if local_replicas is not None and local_replicas < replicas:
        raise UsageError(
            f"--data-parallel-size-local {local_replicas} of --data-parallel-size {replicas} is "
            "not supported: Holdfast would not run the replicas of the other nodes.",
            remedy="run all replicas on this node, or use `vllm serve` on every node.",
        )


def refuse_model(model: str, *, is_demo: bool) -> None:
    """Check the named model.

    Raises:
        UsageError: `--demo` was given too, or nothing is at that path.
    """
    if is_demo:
        raise UsageError(
            f"--demo serves its own model, but {model!r} was given too.",
            remedy="leave out one of them.",
        )
    is_path = model.startswith(("/", "./", "../", "~"))
    if is_path and not _exists(Path(model)):
        raise UsageError(
            f"there is no model at {model}, or it cannot be read.",
            remedy="name a directory, or a model on the Hugging Face Hub as `owner/name`.",
        )


def no_model() -> HoldfastError:
    """Return the error for a command line that names no model."""
    return UsageError(
        "no model was given.",
        remedy="name one, or use --demo for a small model of Holdfast's own.",
    )


def _destination(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _exists(path: Path) -> bool:
    with suppress(OSError, ValueError):
        return path.exists()
    return False
