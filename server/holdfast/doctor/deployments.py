"""What does a Compose file or a Kubernetes manifest ask for? Read into one record a container.

Only what a check looks at is read, and only from what is written there: what an image, a webhook or
a default of the cluster adds later is not seen.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from holdfast.errors import UsageError
from holdfast.settings.values import size_bytes
from holdfast.workspace.plan import MIB

DEFAULT_SHARED_BYTES = 64 * MIB
"""Of Docker, and of containerd in a pod."""
COMPOSE_STOP_SECONDS = 10.0
POD_STOP_SECONDS = 30.0
_COMPOSE = re.compile(r"^services:", re.MULTILINE)
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::?-(?P<default>[^}]*)|:?\?[^}]*)?\}")
_PROGRAMS = ("/holdfast", "/vllm")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe of Kubernetes."""

    path: str
    """Empty for one that makes no HTTP request."""
    budget_seconds: float
    """How long it may fail before Kubernetes acts."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """One container that serves, as a manifest asks for it."""

    source: str
    """The manifest and the container in it."""
    is_pod: bool
    image: str
    command: tuple[str, ...]
    """Entry point and arguments, as far as the manifest gives them."""
    environment: Mapping[str, str]
    restart: str
    """The word of Docker or Kubernetes; empty if none is given."""
    stop_seconds: float
    """From the request to stop until the container is killed."""
    pre_stop_seconds: float
    """What of that passes before SIGTERM."""
    shared_bytes: int | None
    """None for that of the host."""
    mounts: Mapping[str, bool]
    """Whether what lies at each path outlives the container."""
    liveness: Probe | None = None
    startup: Probe | None = None

    @property
    def words(self) -> list[str]:
        """The command with the script of a shell taken apart, and programs without their path."""
        words = list(self.command)
        if words[1:2] == ["-c"]:
            words = [*words[:2], *" ".join(words[2:]).replace(";", " ").split()]
        return [PurePath(word).name if word.endswith(_PROGRAMS) else word for word in words]

    @property
    def is_ours(self) -> bool:
        """Whether it runs Holdfast."""
        is_our_image = "holdfast" in PurePath(self.image).name.partition(":")[0]
        return "holdfast" in self.words or (is_our_image and self.words[:1] in ([], ["serve"]))

    @property
    def is_stock(self) -> bool:
        """Whether it runs vLLM's own server."""
        return not self.is_ours and ("vllm" in self.image or "vllm" in self.words)

    @property
    def is_cpu_build(self) -> bool:
        """Whether the image is named as one with vLLM's build for CPUs."""
        return bool(re.search(r"[:/_-]cpu\b", self.image))

    @property
    def arguments(self) -> tuple[str, ...]:
        """What comes after `serve`."""
        words = self.words
        return tuple(words[words.index("serve") + 1 :]) if "serve" in words else ()


def read_deployments(path: Path, environment: Mapping[str, str]) -> list[Deployment]:
    """Every container in the file that runs vLLM or Holdfast, init containers left out.

    `environment` fills in the variables of a Compose file.

    Raises:
        UsageError: the file cannot be read, or holds neither a Compose file nor such a manifest.
    """
    found = [
        deployment
        for document in _documents(path, environment)
        for deployment in _of_document(path, document)
        if deployment.is_ours or deployment.is_stock
    ]
    if not found:
        raise UsageError(
            f"--manifest: {path} has no container that runs Holdfast or vLLM.",
            remedy="name a Compose file or Kubernetes manifests, as `helm template` prints them.",
        )
    return found


def _documents(path: Path, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    import yaml  # noqa: PLC0415 - only with --manifest

    try:
        text = path.read_text(encoding="utf-8")
        if _COMPOSE.search(text):
            text = _filled_in(text, environment)
        documents = list(yaml.safe_load_all(text))
    except OSError as error:
        raise UsageError(
            f"--manifest: {path}: {error.strerror}.", remedy="name a readable YAML file."
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # Not its message, which quotes the file: a key may stand there.
        mark = getattr(error, "problem_mark", None)
        raise UsageError(
            f"--manifest: {path} is not YAML{f', see line {mark.line + 1}' if mark else ''}.",
            remedy="name a readable YAML file.",
        ) from None
    return [document for document in documents if isinstance(document, dict)]


def _filled_in(text: str, environment: Mapping[str, str]) -> str:
    """The text with `${NAME}` and `${NAME:-default}` as Compose reads them."""

    def value(found: re.Match[str]) -> str:
        return environment.get(found["name"]) or found["default"] or found[0]

    return _VARIABLE.sub(value, text)


def _of_document(path: Path, document: dict[str, Any]) -> Iterator[Deployment]:
    try:
        if isinstance(document.get("services"), dict):
            for name, service in document["services"].items():
                yield _of_service(f"{path.name}: {name}", service)
        elif document.get("kind") == "List":
            for item in document["items"]:
                yield from _of_document(path, item)
        elif pod := _pod_of(document):
            name = document["metadata"].get("name", document["kind"])
            for container in pod["containers"]:
                source = f"{path.name}: {name}/{container['name']}"
                yield _of_container(source, pod, container)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"--manifest: {path} is not as its kind has to be ({type(error).__name__}: {error}).",
            remedy="check it with `docker compose config` or `kubectl apply --dry-run=server`.",
        ) from None


def _pod_of(document: dict[str, Any]) -> dict[str, Any] | None:
    spec = document.get("spec")
    if not isinstance(spec, dict):
        return None
    if document.get("kind") == "Pod":
        return spec
    template = spec.get("template")
    if isinstance(template, dict) and "containers" in template.get("spec", {}):
        return dict(template["spec"])
    return None


def _of_service(source: str, service: dict[str, Any]) -> Deployment:
    is_shared = str(service.get("ipc", "")).startswith(("host", "service:", "container:"))
    volumes = [_compose_mount(volume) for volume in service.get("volumes") or []]
    return Deployment(
        source=source,
        is_pod=False,
        image=str(service.get("image", "")),
        command=(*_words(service.get("entrypoint")), *_words(service.get("command"))),
        environment=_compose_environment(service.get("environment") or {}),
        restart=str(service.get("restart", "")),
        stop_seconds=_duration(service.get("stop_grace_period"), COMPOSE_STOP_SECONDS),
        pre_stop_seconds=0.0,
        shared_bytes=None
        if is_shared
        else size_bytes(_binary(service.get("shm_size", DEFAULT_SHARED_BYTES))),
        mounts={target: is_kept for target, is_kept in volumes if target},
    )


def _binary(size: object) -> str:
    # Docker's `64m` is 64 MiB, whether or not a `b` follows.
    text = str(size).strip().lower().removesuffix("b")
    return f"{text}ib" if text[-1:].isalpha() and not text.endswith("i") else text


def _compose_environment(given: Any) -> dict[str, str]:
    if isinstance(given, dict):
        return {name: "" if value is None else str(value) for name, value in given.items()}
    pairs = (str(entry).partition("=") for entry in given)
    return {name: value for name, _, value in pairs}


def _compose_mount(volume: Any) -> tuple[str, bool]:
    if isinstance(volume, dict):
        return str(volume.get("target", "")), volume.get("type") in {"volume", "bind"}
    source, _, rest = str(volume).partition(":")
    return (rest.partition(":")[0], True) if rest else (source, False)


def _of_container(source: str, pod: dict[str, Any], container: dict[str, Any]) -> Deployment:
    volumes = {volume["name"]: volume for volume in pod.get("volumes") or []}
    mounts = {
        str(mount["mountPath"]): volumes.get(mount["name"], {})
        for mount in container.get("volumeMounts") or []
    }
    pre_stop = ((container.get("lifecycle") or {}).get("preStop") or {}).get("sleep") or {}
    grace_seconds = pod.get("terminationGracePeriodSeconds")
    return Deployment(
        source=source,
        is_pod=True,
        image=str(container.get("image", "")),
        command=(*_words(container.get("command")), *_words(container.get("args"))),
        environment={
            entry["name"]: str(entry["value"])
            for entry in container.get("env") or []
            if "value" in entry
        },
        restart=str(pod.get("restartPolicy", "")),
        stop_seconds=POD_STOP_SECONDS if grace_seconds is None else float(grace_seconds),
        pre_stop_seconds=float(pre_stop.get("seconds", 0)),
        shared_bytes=None if pod.get("hostIPC") else _pod_shared_bytes(mounts),
        mounts={path: "emptyDir" not in volume for path, volume in mounts.items()},
        liveness=_probe(container.get("livenessProbe")),
        startup=_probe(container.get("startupProbe")),
    )


def _pod_shared_bytes(mounts: Mapping[str, dict[str, Any]]) -> int | None:
    if "/dev/shm" not in mounts:  # noqa: S108 - a path in a manifest
        return DEFAULT_SHARED_BYTES
    limit = (mounts["/dev/shm"].get("emptyDir") or {}).get("sizeLimit")  # noqa: S108 - as above
    return None if limit is None else size_bytes(f"{str(limit).removesuffix('B')}B")


def _probe(given: dict[str, Any] | None) -> Probe | None:
    if not given:
        return None
    attempts = int(given.get("failureThreshold", 3)) * float(given.get("periodSeconds", 10))
    return Probe(
        path=str((given.get("httpGet") or {}).get("path", "")),
        budget_seconds=float(given.get("initialDelaySeconds", 0)) + attempts,
    )


def _words(given: Any) -> Sequence[str]:
    if given is None:
        return ()
    return shlex.split(given) if isinstance(given, str) else [str(word) for word in given]


def _duration(given: object, default_seconds: float) -> float:
    """Seconds of what Compose writes as `1m15s`; ValueError for anything else."""
    if given is None:
        return default_seconds
    text = str(given)
    parts = re.findall(r"(\d+(?:\.\d+)?)(us|ms|s|m|h)", text)
    if not parts or "".join(f"{number}{unit}" for number, unit in parts) != text:
        raise ValueError(f"{text!r} is no duration")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)
