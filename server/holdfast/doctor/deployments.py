"""One container as a manifest describes it.

The record holds what the checks need, and only what the manifest says: what an image, a webhook or
a default of the cluster adds is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, Literal
from urllib.parse import urlsplit

from holdfast.doctor.command_line import UNKNOWN, Program, read_program
from holdfast.engine.unsupported import drop_empty
from holdfast.workspace.plan import MIB

DEFAULT_SHARED_BYTES = 64 * MIB
"""The default of Docker, and of containerd in a pod."""
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a path in a manifest
HOME = "/home/holdfast"
STATE_DIRECTORY = f"{HOME}/.local/state/holdfast"
"""Where our images keep what Holdfast learned."""
ProbeRole = Literal["startup", "readiness", "liveness", "health"]
_URL = re.compile(r"https?://[^\s'\"\\]+")
_OWN_CHECK = re.compile(r"\bholdfast['\",\s]+health\b")
KEY_HEADER = "authorization"
_LOCAL_HOSTS = {"localhost", "127.0.0.1", "::1", "0.0.0.0"}  # noqa: S104 - compared, not bound
"""A probe of any other host is not checked."""
_DEFAULT_PORTS = {"http": 80, "https": 443}
_NOT_SERVERS = re.compile(r"router|bench|exporter|operator|dashboard")


@dataclass(frozen=True, slots=True)
class Probe:
    """A Kubernetes probe, or the health check of a Compose service."""

    path: str = ""
    """Empty if the probe makes no HTTP request that can be read."""
    is_connection: bool = False
    """Whether it only connects."""
    is_own_check: bool = False
    """Whether it is `holdfast health`, which knows the port and the scheme of its server."""
    port: str = ""
    """A number; empty if the container has no port of the given name."""
    scheme: str = "http"
    has_key: bool = False
    """Whether the request has a header with an API key."""
    delay_seconds: float = 0.0
    period_seconds: float = 10.0
    timeout_seconds: float = 1.0
    attempts: int = 3

    @property
    def budget_seconds(self) -> float:
        """How long the probe may fail before Kubernetes acts."""
        return self.delay_seconds + self.attempts * self.period_seconds


@dataclass(frozen=True, slots=True)
class Deployment:
    """One container of a manifest."""

    source: str
    """The manifest and the container in it."""
    is_pod: bool
    image: str = ""
    command: tuple[str, ...] = ()
    """Entry point and arguments, if the manifest gives them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The variables that have a value in the manifest."""
    unknown_variables: frozenset[str] = frozenset()
    """The names of the variables that get their value from elsewhere."""
    is_environment_complete: bool = True
    """Whether the container has no other variables."""
    restart: str = ""
    """The restart policy in the words of Docker or Kubernetes; empty if none is given."""
    stop_seconds: float = 0.0
    """The time from the request to stop until the container is killed."""
    pre_stop_seconds: float = 0.0
    """The part of `stop_seconds` before SIGTERM is sent."""
    shared_bytes: int | None = None
    """The size of /dev/shm; None for the host's own, or one without a limit."""
    mounts: Mapping[str, bool] = field(default_factory=dict)
    """Each mount path, and whether what is written there outlives the container."""
    gpus: int | None = None
    """The number of GPUs; None if the manifest does not give it."""
    probes: Mapping[ProbeRole, Probe] = field(default_factory=dict)
    has_own_health_check: bool = False
    """Whether the service replaces or disables the health check of the image."""
    problem: str = ""
    """Why only `source`, `image` and `command` could be read; empty if all could."""

    @property
    def program(self) -> Program:
        """The server that the container runs."""
        return read_program(self.command)

    @property
    def is_ours(self) -> bool:
        """Whether the container runs a server of Holdfast."""
        if self.program.name:
            return self.program.name == "holdfast" and not self.program.is_follower
        return "holdfast" in self._image_name and self.command[:1] in {(), ("serve",)}

    @property
    def is_follower(self) -> bool:
        """Whether the container runs the ranks of its node for a head."""
        if self.program.name:
            return self.program.is_follower
        return "holdfast" in self._image_name and self.command[:1] == ("follow",)

    @property
    def is_stock(self) -> bool:
        """Whether the container runs vLLM's own server."""
        if self.program.name or "holdfast" in self._image_name:
            return self.program.name == "vllm"
        is_named_so = "vllm" in self.image.partition("@")[0]
        return is_named_so and not _NOT_SERVERS.search(self._image_name)

    @property
    def is_checked(self) -> bool:
        """Whether the container runs Holdfast or vLLM."""
        return self.is_ours or self.is_stock or self.is_follower

    @property
    def is_cpu_build(self) -> bool:
        """Whether the image's name says that it contains vLLM's CPU build."""
        return bool(re.search(r"[:/_-]cpu\b", self.image))

    @property
    def arguments(self) -> tuple[str, ...]:
        """The words after `serve`, with the home of the container in place of `~`."""
        words = self.program.arguments
        if not self.program.name and words[:1] == ("serve",):
            words = words[1:]
        return tuple(re.sub(r"(^|=)~(?=/|$)", rf"\g<1>{self._home}", word) for word in words)

    @property
    def is_fully_known(self) -> bool:
        """Whether the manifest has all flags and variables that a check reads.

        A follower gets its flags from the head.
        """
        words = self.arguments
        has_others = any(name.startswith("HOLDFAST_") for name in self.unknown_variables)
        return (
            not any(UNKNOWN in word for word in words)
            and not any(word.partition("=")[0] == "--config" for word in words)
            and self.is_environment_complete
            and not has_others
            and not self.is_follower
        )

    def may_have(self, variable: str) -> bool:
        """Return whether the variable may be set by something other than the manifest."""
        return variable in self.unknown_variables or not self.is_environment_complete

    @property
    def settings_environment(self) -> Mapping[str, str]:
        """The variables with the home of the container in place of `~`."""
        return {
            name: re.sub(r"^~(?=/|$)", self._home, value)
            for name, value in self.environment.items()
        }

    @property
    def default_state_directory(self) -> PurePosixPath:
        """Where Holdfast keeps what it learned by default."""
        base = self.environment.get("XDG_STATE_HOME") or f"{self._home}/.local/state"
        return PurePosixPath(base) / "holdfast"

    @property
    def _home(self) -> str:
        return self.environment.get("HOME") or HOME

    @property
    def _image_name(self) -> str:
        return PurePosixPath(self.image.partition("@")[0]).name.partition(":")[0]


def read_if_served(named: Deployment, read: Callable[[], Deployment]) -> Deployment:
    """Read the rest of a container that runs Holdfast or vLLM, or note its problem."""
    if not named.is_checked:
        return named
    try:
        return read()
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        return replace(named, problem=problem)


def probe_of_command(command: object) -> Probe | None:
    """Return the HTTP request that a command makes to its own container; None if it makes none."""
    if _OWN_CHECK.search(str(command)):
        return Probe(path="/readyz", is_own_check=True)
    found = _URL.search(str(command))
    url = urlsplit(found[0].rstrip(";)'\",") if found else "")
    if url.hostname not in _LOCAL_HOSTS:
        return None
    return Probe(
        path=f"{url.path or '/'}{'?' if url.query else ''}{url.query}",
        port=str(url.port or _DEFAULT_PORTS[url.scheme]),
        scheme=url.scheme,
        has_key=bool(re.search(rf"\b{KEY_HEADER}\b[\\'\"\s]*[:,]", str(command), re.IGNORECASE)),
    )


def whole_number(given: Any) -> int:
    """Return the number as an integer; ValueError if it is none, or needs more than 64 bits."""
    with suppress(OverflowError, ValueError):
        if abs(number := int(given)) < 1 << 63:
            return number
    raise ValueError(f"{given} is not a whole number of 64 bits")


def known_and_unknown(variables: Mapping[str, str]) -> tuple[dict[str, str], frozenset[str]]:
    """Return the variables with a known value that `serve` reads, and the names of the unknown."""
    seen = {name: value for name, value in variables.items() if UNKNOWN not in value}
    unknown = frozenset(variables) - frozenset(seen)
    drop_empty(seen)
    return seen, unknown
