"""What one container is asked to be: the record that manifests are read into.

Only what a check looks at is read, and only from what is written there: what an image, a webhook or
a default of the cluster adds later is not seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Literal
from urllib.parse import urlsplit

from holdfast.doctor.command_line import UNSEEN, Program, read_program, seen_arguments
from holdfast.workspace.plan import MIB

DEFAULT_SHARED_BYTES = 64 * MIB
"""Of Docker, and of containerd in a pod."""
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a path in a manifest
HOME = "/home/holdfast"
STATE_DIRECTORY = f"{HOME}/.local/state/holdfast"
"""Of our images, as the one above."""
ProbeRole = Literal["startup", "readiness", "liveness", "health"]
_URL = re.compile(r"https?://[^\s'\"\\]+")
_HERE = {"localhost", "127.0.0.1", "::1", "0.0.0.0"}  # noqa: S104 - compared, not bound
"""What another host answers is not known."""
_DEFAULT_PORTS = {"http": 80, "https": 443}
_NOT_SERVERS = re.compile(r"router|bench|exporter|operator|dashboard")


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe of Kubernetes, or the health check of Compose."""

    path: str = ""
    """Empty for one that makes no HTTP request."""
    port: str = ""
    """As a number; empty if the container has no port of that name."""
    scheme: str = "http"
    delay_seconds: float = 0.0
    period_seconds: float = 10.0
    timeout_seconds: float = 1.0
    attempts: int = 3

    @property
    def budget_seconds(self) -> float:
        """How long it may fail before Kubernetes acts."""
        return self.delay_seconds + self.attempts * self.period_seconds


@dataclass(frozen=True, slots=True)
class Deployment:
    """One container that serves, as a manifest asks for it."""

    source: str
    """The manifest and the container in it."""
    is_pod: bool
    image: str = ""
    command: tuple[str, ...] = ()
    """Entry point and arguments, as far as the manifest gives them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The variables whose value is written there."""
    unseen_variables: frozenset[str] = frozenset()
    """Those whose value comes from elsewhere."""
    is_environment_whole: bool = True
    """Whether there are no others."""
    restart: str = ""
    """The word of Docker or Kubernetes; empty if none is given."""
    stop_seconds: float = 0.0
    """From the request to stop until the container is killed."""
    pre_stop_seconds: float = 0.0
    """What of that passes before SIGTERM."""
    shared_bytes: int | None = None
    """None for that of the host."""
    mounts: Mapping[str, bool] = field(default_factory=dict)
    """Whether what is written at each path outlives the container."""
    gpus: int | None = None
    """None if the manifest does not count them."""
    probes: Mapping[ProbeRole, Probe] = field(default_factory=dict)
    has_own_health_check: bool = False
    """Whether it does without that of the image."""
    problem: str = ""
    """Why nothing but source, image, command and this could be read."""

    @property
    def program(self) -> Program:
        """The server in it."""
        return read_program(self.command)

    @property
    def is_ours(self) -> bool:
        """Whether it runs Holdfast."""
        if self.program.name:
            return self.program.name == "holdfast"
        return "holdfast" in self._image_name and self.command[:1] in {(), ("serve",)}

    @property
    def is_stock(self) -> bool:
        """Whether it runs vLLM's own server."""
        if self.program.name or "holdfast" in self._image_name:
            return self.program.name == "vllm"
        is_named_so = "vllm" in self.image.partition("@")[0]
        return is_named_so and not _NOT_SERVERS.search(self._image_name)

    @property
    def is_cpu_build(self) -> bool:
        """Whether the image is named as one with vLLM's build for CPUs."""
        return bool(re.search(r"[:/_-]cpu\b", self.image))

    @property
    def arguments(self) -> tuple[str, ...]:
        """What comes after `serve`, with the home of the container in place of `~`."""
        words = self.program.arguments
        if not self.program.name and words[:1] == ("serve",):
            words = words[1:]
        return tuple(re.sub(r"(^|=)~(?=/|$)", rf"\g<1>{self._home}", word) for word in words)

    @property
    def is_settled(self) -> bool:
        """Whether all flags and variables that a check reads are written in the manifest."""
        arguments = self.arguments
        flags = [one.partition("=")[0] for one in arguments if one.startswith("-")]
        seen = [one.partition("=")[0] for one in seen_arguments(arguments) if one.startswith("-")]
        has_others = any(name.startswith("HOLDFAST_") for name in self.unseen_variables)
        return (
            flags == seen
            and "--config" not in flags
            and self.is_environment_whole
            and not has_others
        )

    def may_have(self, variable: str) -> bool:
        """Whether the variable may be set where it is not seen."""
        return variable in self.unseen_variables or not self.is_environment_whole

    @property
    def settings_environment(self) -> Mapping[str, str]:
        """The variables with the home of the container in place of `~`."""
        return {
            name: re.sub(r"^~(?=/|$)", self._home, value)
            for name, value in self.environment.items()
        }

    @property
    def default_state_directory(self) -> PurePosixPath:
        """Where Holdfast keeps what it learned if no flag says so."""
        base = self.environment.get("XDG_STATE_HOME") or f"{self._home}/.local/state"
        return PurePosixPath(base) / "holdfast"

    @property
    def _home(self) -> str:
        return self.environment.get("HOME") or HOME

    @property
    def _image_name(self) -> str:
        return PurePosixPath(self.image.partition("@")[0]).name.partition(":")[0]


def read_served(named: Deployment, read: Callable[[], Deployment]) -> Deployment:
    """The whole record of a container that serves, or its problem; any other stays as it is."""
    if not (named.is_ours or named.is_stock):
        return named
    try:
        return read()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        return replace(named, problem=problem)


def probe_of_command(command: object) -> Probe | None:
    """What a command asks of this container; None if it asks for no URL there."""
    found = _URL.search(str(command))
    url = urlsplit(found[0].rstrip(";)'\",") if found else "")
    if url.hostname not in _HERE:
        return None
    return Probe(
        path=f"{url.path or '/'}{'?' if url.query else ''}{url.query}",
        port=str(url.port or _DEFAULT_PORTS[url.scheme]),
        scheme=url.scheme,
    )


def seen_and_unseen(variables: Mapping[str, str]) -> tuple[dict[str, str], frozenset[str]]:
    """The variables whose value is known, and the names of the others."""
    seen = {name: value for name, value in variables.items() if UNSEEN not in value}
    return seen, frozenset(variables) - frozenset(seen)
