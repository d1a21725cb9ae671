"""The flags of `holdfast doctor`, the order of its checks, and its exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import psutil

from holdfast.doctor import checks, manifest_checks, peers
from holdfast.doctor.command_line import known_arguments
from holdfast.doctor.compose import compose_deployments
from holdfast.doctor.deployments import Deployment
from holdfast.doctor.driver_log import check_driver_log, read_driver_log
from holdfast.doctor.findings import (
    Finding,
    HazardName,
    as_json,
    as_lines,
    failure,
    has_failed,
    warning,
)
from holdfast.doctor.front_checks import check_front, check_media, key_files, refused_keys
from holdfast.doctor.link_checks import check_link
from holdfast.doctor.links import read_network
from holdfast.doctor.machine import read_machine
from holdfast.doctor.parallelism import Layout, read_layout
from holdfast.doctor.peer_checks import check_peer
from holdfast.doctor.pods import pod_deployments
from holdfast.engine.unsupported import REFUSED_VARIABLES, refuse_model
from holdfast.errors import ExitCode, HoldfastError, UsageError
from holdfast.nodes.facts import node_facts
from holdfast.settings import Settings
from holdfast.settings.flag import Parser, command_parser
from holdfast.settings.variable_names import remedy_of
from holdfast.settings.yaml_files import read_yaml
from holdfast.terminal import replace_what_has_no_code
from holdfast.workspace.learned_store import default_directory

Read = TypeVar("Read")
ReadSettings = Callable[[Sequence[str], Mapping[str, str]], Settings]
"""Reads a command line of `serve`; the model may be missing."""
_EPILOG = """\
All flags of `holdfast serve` work too, and MODEL may be left out. No engine is started. With
--manifest alone, this machine is not checked. For several nodes, run it on each of them with --peer
and the address of the other. Exit codes: 0 no failure found, 2 the start would fail for certain, or
bad usage.
"""


def print_findings(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    expand: Callable[[Sequence[str]], list[str]],
    read_settings: ReadSettings,
) -> ExitCode:
    """Print every finding, and return the exit code: 2 if one is a failure, otherwise 0.

    `expand` puts the flags of a `--config` file before those of the command line.

    Raises:
        UsageError: a flag of the doctor is wrong, or a manifest cannot be read.
    """
    flags, others = _parser().parse_known_args(arguments)
    deployments = read_deployments(flags.manifest) if flags.manifest else []
    findings: list[Finding] = []
    if others or not deployments:
        findings += _own_findings(others, environment, expand, read_settings)
    for deployment in deployments:
        findings += _deployment_findings(deployment, expand, read_settings)
    if flags.peer:
        health_ports = (flags.peer_port,) if flags.peer_port else peers.HEALTH_PORTS
        findings += _peer_findings(flags.peer, health_ports, environment, others, expand)
    findings = list(dict.fromkeys(findings))  # two parsers may refuse the same flag
    replace_what_has_no_code(sys.stdout)
    print(as_json(findings) if flags.json else "\n".join(as_lines(findings)))  # noqa: T201 - what was asked for
    return ExitCode.USAGE if has_failed(findings) else ExitCode.STOPPED


def _parser() -> Parser:
    parser = command_parser(
        "doctor",
        "[MODEL] [flags of holdfast serve] [flags below]",
        "Check this machine, its environment and the flags; name each hazard.",
        _EPILOG,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--manifest",
        action="append",
        type=Path,
        metavar="FILE",
        help="also check what `docker compose config` or `helm template` prints; `-` reads "
        "standard input; may be repeated",
    )
    parser.add_argument(
        "--peer",
        action="append",
        type=peers.peer_name,
        metavar="HOST[:PORT]",
        help="also check the way to another node of the same engine, and what runs there; PORT is "
        f"the head's --node-port (default: {peers.NODE_PORT}); may be repeated",
    )
    follower, head = peers.HEALTH_PORTS
    parser.add_argument(
        "--peer-port",
        type=peers.peer_port,
        metavar="PORT",
        help=f"port of the peer's health routes (default: {follower}, a follower's, then {head}, a "
        "head's)",
    )
    return parser


def read_deployments(paths: Sequence[Path]) -> list[Deployment]:
    """Return every container in the files that runs vLLM or Holdfast, except init containers.

    If something about a container cannot be read, its `problem` says so.

    Raises:
        UsageError: a file cannot be read, Compose has not resolved it, or none holds such a
            container.
    """
    found = (deployment for path in paths for deployment in _read_manifest(path))
    served = [deployment for deployment in found if deployment.is_checked]
    if not served:
        raise UsageError(
            f"--manifest: {', '.join(map(str, paths))}: no container in it runs Holdfast or vLLM.",
            remedy="name what `docker compose config` or `helm template` prints.",
        )
    return served


def _read_manifest(path: Path) -> Iterator[Deployment]:
    for document in read_yaml("--manifest", path):
        match document:
            case {"services": dict()} | {"include": _}:
                yield from compose_deployments(path, document)
            case dict():
                yield from pod_deployments(path.name, document)


def _own_findings(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    expand: Callable[[Sequence[str]], list[str]],
    read_settings: ReadSettings,
) -> Iterator[Finding]:
    settings, refusals = _settings(arguments, environment, read_settings)
    yield from refusals
    if arguments and not arguments[0].startswith("-"):
        is_demo = settings.is_demo
        yield from _read_or_default(
            lambda: refuse_model(arguments[0], is_demo=is_demo), None, "model"
        )[1]
    if not refusals:
        yield from check_front(settings, datetime.now(UTC))
    # What cannot be expanded is already among the refusals.
    expanded, _ = _read_or_default(lambda: expand(arguments), arguments)
    yield from check_media(expanded, environment)
    layout, refusals = _read_or_default(lambda: read_layout(expanded), Layout())
    yield from refusals
    given = settings.workspace.learned_directory
    machine = read_machine(environment, default_directory() if given == "default" else given)
    yield from checks.check_environment(environment, is_demo=settings.is_demo)
    yield from checks.check_machine(machine, layout)


def _peer_findings(
    names: Sequence[peers.PeerName],
    health_ports: Sequence[int],
    environment: Mapping[str, str],
    arguments: Sequence[str],
    expand: Callable[[Sequence[str]], list[str]],
) -> Iterator[Finding]:
    machine = read_machine(environment, None)
    network = read_network()
    # What is wrong with the flags is among the findings about this machine.
    layout, _ = _read_or_default(lambda: read_layout(expand(arguments)), Layout())
    yield from check_driver_log(read_driver_log())
    for name in names:
        source = f"peer {name.host}"
        try:
            peer = peers.examine(name, network, health_ports)
        except UsageError as error:
            yield replace(failure("peer", error.cause, error.remedy), source=source)
            continue
        available_bytes = psutil.virtual_memory().available
        for finding in check_peer(peer, node_facts(""), available_bytes):
            yield replace(finding, source=source)
        for finding in check_link(peer, network, machine, layout):
            yield replace(finding, source=source)


def _settings(
    arguments: Sequence[str], environment: Mapping[str, str], read_settings: ReadSettings
) -> tuple[Settings, list[Finding]]:
    # The refused variables have findings of their own.
    others = {
        name: environment[name]
        for name in environment
        if name not in REFUSED_VARIABLES and not remedy_of(name)
    }
    return _read_or_default(lambda: read_settings(arguments, others), Settings())


def _read_or_default(
    read: Callable[[], Read], default: Read, name: HazardName = "command-line"
) -> tuple[Read, list[Finding]]:
    """Return what `read` returns, or the default with a finding that says why it was refused."""
    try:
        return read(), []
    except HoldfastError as error:
        return default, [failure(name, error.cause, error.remedy)]


def _deployment_findings(
    deployment: Deployment,
    expand: Callable[[Sequence[str]], list[str]],
    read_settings: ReadSettings,
) -> Iterator[Finding]:
    if deployment.is_follower:
        yield from manifest_checks.check_follower(deployment)
        return
    # The file is in the container, not on this machine.
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?")
    arguments = expand(parser.parse_known_args(known_arguments(deployment.arguments))[1])
    settings, refusals = _settings(arguments, deployment.settings_environment, read_settings)
    layout, other_refusals = _read_or_default(lambda: read_layout(arguments), Layout())
    if deployment.is_ours and not deployment.problem:
        refusals += [*other_refusals, *_key_findings(deployment, settings)]
        for finding in refusals:
            yield manifest_checks.as_seen(deployment, finding)
    for finding in other_refusals if not deployment.is_ours else ():
        seen = f"checked as if it had one rank: {finding.seen}"
        yield replace(warning("command-line", seen, finding.remedy), source=deployment.source)
    yield from manifest_checks.check_deployment(deployment, layout, settings)


def _key_findings(deployment: Deployment, settings: Settings) -> Iterator[Finding]:
    """Yield what is wrong with the keys, if the manifest contains all of them."""
    is_written = deployment.is_fully_known and not deployment.may_have("VLLM_API_KEY")
    if is_written and not key_files(settings) and (refusal := refused_keys(settings)):
        yield refusal
