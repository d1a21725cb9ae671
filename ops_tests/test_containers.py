"""The image and the Compose file, built and run with real buildah, podman and Compose.

No image can be pulled here, so bases and neighbours are stand-ins, and `containers.STAND_INS` names
each. What is ours (Dockerfile, entry point, user, health check, Compose file, rules) is what is
shipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from holdfast import __version__
from ops.prometheus import tool
from ops.queries import ROOT
from ops_tests.containers import ALERTMANAGER, PROMETHEUS, PYTHON_BASE, VLLM_BASE, Engine, engine
from servers import KV_CACHE_BYTES, wait_until

BUILD_SECONDS = 1800.0
READY_SECONDS = 900.0
STOP_SECONDS = 200
SMALL = (
    f"--kv-cache-memory-bytes={KV_CACHE_BYTES}",
    "--max-num-seqs=16",
    "--max-num-batched-tokens=1024",
)
STREAM_TOKENS = 7000
COMPOSE_NAME = "holdfast-holdfast-1"
CPUS = f"--cpus={(os.cpu_count() or 1) * 0.75}"
"""vLLM's processes wait for each other in `sched_yield`. Linux 6.18 lets a group of processes that
does so on every core keep all others from running for seconds, the client of these tests too."""
SCRATCH = "/tmp:exec"  # noqa: S108 - within a container

pytestmark = [pytest.mark.tools, pytest.mark.timeout(2400)]


@dataclass(frozen=True, slots=True)
class Running:
    """A container that serves."""

    engine: Engine
    name: str
    url: str

    def code(self, path: str) -> int:
        """The status of a route; 0 while nobody listens."""
        try:
            return httpx.get(f"{self.url}{path}", timeout=30, trust_env=False).status_code
        except httpx.TransportError:
            return 0

    def until_ready(self) -> None:
        """Wait for `/readyz` to be 200."""
        wait_until(
            lambda: self.code("/readyz") == 200,
            deadline_seconds=READY_SECONDS,
            what=lambda: self.engine.call("podman", "logs", self.name).stdout[-4000:],
        )

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """One command inside."""
        return self.engine.call("podman", "exec", self.name, *command)

    def client(self) -> OpenAI:
        """A client of it that does not try again."""
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=150)


@pytest.fixture(scope="module")
def containers() -> Engine:
    """buildah and podman, with a base."""
    return engine()


@pytest.fixture(scope="module")
def cpu_image(containers: Engine) -> str:
    """The CPU image, built from the Dockerfile."""
    return containers.build("cpu", seconds=BUILD_SECONDS)


@contextmanager
def container(made: Engine, image: str, *command: str) -> Iterator[Running]:
    """A container as the documentation starts one, with volumes that are new."""
    options = (
        *("--read-only", "--tmpfs", SCRATCH, "--shm-size", "1g", "--cap-drop", "all", CPUS),
        *(
            "--security-opt",
            "no-new-privileges",
            "--ulimit",
            "host",
            "--publish",
            "127.0.0.1::8000",
        ),
        *("--volume", "/home/holdfast/.cache"),
        *("--volume", "/home/holdfast/.local/state/holdfast"),
    )
    name = made.run("podman", "run", "--detach", *options, image, *command)
    try:
        address = made.run("podman", "port", name, "8000/tcp")
        yield Running(made, name, f"http://{address}")
    finally:
        made.call("podman", "rm", "--force", "--volumes", "--time", "5", name)


def stream_through_a_stop(server: Running, stop: list[str]) -> tuple[str | None, int, int]:
    """A long answer while the container is stopped: how it ends, its size, and the code of stop."""
    stream = server.client().completions.create(
        model="holdfast-demo",
        prompt="on and on",
        max_tokens=STREAM_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    next(stream)
    finish, tokens = None, 0
    with subprocess.Popen(stop, env=server.engine.environment) as stopping:
        try:
            wait_until(
                lambda: server.code("/readyz") == 503,
                deadline_seconds=30,
                what=lambda: f"/readyz after SIGTERM: {server.code('/readyz')}",
            )
            for chunk in stream:
                if chunk.usage is not None:
                    tokens = chunk.usage.completion_tokens
                finish = next((choice.finish_reason for choice in chunk.choices), finish)
            return finish, tokens, stopping.wait(STOP_SECONDS + 30)
        finally:
            stopping.kill()


def test_the_container_serves_and_drains(containers: Engine, cpu_image: str) -> None:
    """From nothing to READY, answers, and a stop that lets a stream finish and exits with 0.

    The base is a stand-in: Debian's own Python 3.11 in place of the official image of it.
    """
    flags = (*SMALL, "--drain-timeout=150")  # for a machine that does much else
    with container(containers, cpu_image, "serve", "--demo", *flags) as server:
        wait_until(
            lambda: server.code("/readyz") == 503,
            deadline_seconds=60,
            what=lambda: "it does not listen before it is ready",
        )
        check = ("podman", "healthcheck", "run", server.name)
        assert containers.call(*check).returncode != 0
        server.until_ready()
        assert containers.call(*check).returncode == 0
        answer = server.client().chat.completions.create(
            model="holdfast-demo", messages=[{"role": "user", "content": "hello"}], max_tokens=8
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8
        assert server.execute("id", "--user").stdout.strip() == "10001"
        # A directory of the user: only a root file system that is read-only keeps it as it is.
        assert server.execute("touch", "/home/holdfast/x").returncode != 0
        (first,) = server.execute("cat", "/proc/1/comm").stdout.split()
        assert first == "holdfast"
        stop = containers.command("podman", "stop", "--time", str(STOP_SECONDS), server.name)
        assert stream_through_a_stop(server, stop) == ("length", STREAM_TOKENS, 0)
        assert containers.run("podman", "wait", server.name) == "0"


def test_the_doctor_is_content_with_the_image(containers: Engine, cpu_image: str) -> None:
    """The doctor in the image has no fault to find when its state is on a volume."""
    report = containers.run(
        "podman",
        *("run", "--rm", "--read-only", "--tmpfs", SCRATCH, "--ulimit", "host"),
        *("--shm-size", "1g", "--env", "VLLM_API_KEY=secret"),
        *("--volume", "/home/holdfast/.local/state/holdfast"),
        *(cpu_image, "doctor", "--demo", "--json"),
    )
    found = {one["name"]: one["severity"] for one in json.loads(report)["findings"]}
    assert found["state-directory"] == "ok"
    assert found["build-tools"] == "ok"
    assert set(found.values()) == {"ok"}


def test_the_doctor_sees_that_state_is_lost_in_a_container(
    containers: Engine, cpu_image: str
) -> None:
    """Without a volume it says so, and Docker's /dev/shm does not hold the queue of a rank."""
    done = containers.call(
        "podman",
        *("run", "--rm", "--ulimit", "host", "--shm-size", "64m"),
        *(cpu_image, "doctor", "--json", "--demo"),
    )
    found = {one["name"]: one["severity"] for one in json.loads(done.stdout)["findings"]}
    assert done.returncode == 2
    assert found["state-directory"] == "warning"
    assert found["shared-memory"] == "failure"


def test_the_cuda_target_builds(containers: Engine, cpu_image: str) -> None:
    """Our layers fit on a base that has vLLM, and what they start is Holdfast.

    The base is a stand-in: our CPU image under the name of vLLM's and without what we add to that,
    so nothing of CUDA is shown.
    """
    without_ours = "userdel holdfast && pip uninstall --yes holdfast platformdirs && rm -r /wheels"
    containers.stand_in(VLLM_BASE, f"FROM {cpu_image}\nUSER 0\nRUN {without_ours}\n", ROOT)
    image = containers.build("cuda", seconds=BUILD_SECONDS)
    run = ("podman", "run", "--rm", "--ulimit", "host", image)
    assert containers.run(*run, "version").splitlines()[0] == f"holdfast {__version__}"
    config = json.loads(containers.run("podman", "inspect", image))[0]["Config"]
    assert config["User"] == "10001:10001"


def compose(environment: dict[str, str], *arguments: str, files: list[Path]) -> None:
    """One call of Compose; AssertionError has its output if it fails."""
    named = [word for file in files for word in ("--file", str(file))]
    done = subprocess.run(
        [tool("docker-compose"), *named, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def make_neighbours(containers: Engine) -> None:
    """Stand-ins for the images of Prometheus and Alertmanager, from the tools of Debian."""
    root = ROOT / ".ops-tools" / "root"
    for image, program in ((PROMETHEUS, "prometheus"), (ALERTMANAGER, "prometheus-alertmanager")):
        containers.stand_in(
            image,
            f"FROM {PYTHON_BASE}\nWORKDIR /\nCOPY usr/bin/{program} /usr/bin/\n"
            "COPY usr/share/prometheus /usr/share/prometheus\n"
            f'ENTRYPOINT ["/usr/bin/{program}"]\n',
            root,
        )


def asked(server: Running, url: str) -> Any:
    """What a neighbour answers, asked from within the container that serves."""
    script = (
        f"from urllib.request import urlopen; print(urlopen({url!r}, timeout=10).read().decode())"
    )
    done = server.execute("python3", "-c", script)
    return json.loads(done.stdout) if done.returncode == 0 else None


def test_compose_starts_server_prometheus_and_alertmanager(
    containers: Engine, cpu_image: str, tmp_path: Path
) -> None:
    """Prometheus scrapes the server, has our rules and knows Alertmanager; the stop drains.

    Prometheus and Alertmanager are stand-ins of Debian, and Grafana, which Debian does not have,
    is left out. The port is a free one, and the engine a small one.
    """
    make_neighbours(containers)
    override = tmp_path / "override.yaml"
    override.write_text(
        "services:\n  holdfast:\n"
        f"    image: {cpu_image}\n"
        f"    command: {json.dumps(['serve', '--demo', '--enforce-eager', *SMALL])}\n"
        '    ports: !override ["127.0.0.1::8000"]\n'
    )
    files = [ROOT / "deploy" / "compose" / "compose.yaml", override]
    services = ("holdfast", "prometheus", "alertmanager")
    with containers.service() as environment:
        try:
            compose(environment, "up", "--detach", "--no-build", *services, files=files)
            address = containers.run("podman", "port", COMPOSE_NAME, "8000/tcp")
            server = Running(containers, COMPOSE_NAME, f"http://{address}")
            server.until_ready()
            targets = wait_until(
                lambda: asked(server, "http://prometheus:9090/api/v1/targets?state=active"),
                deadline_seconds=60,
                what=lambda: "no answer of Prometheus",
            )
            (target,) = targets["data"]["activeTargets"]
            assert target["labels"] == {"instance": "holdfast:8000", "job": "holdfast"}
            wait_until(
                lambda: ready_samples(server) == ["1"],
                deadline_seconds=60,
                what=lambda: "Prometheus does not see READY",
            )
            rules = asked(server, "http://prometheus:9090/api/v1/rules")["data"]["groups"]
            assert {rule["health"] for group in rules for rule in group["rules"]} <= {
                "ok",
                "unknown",
            }
            known = asked(server, "http://prometheus:9090/api/v1/alertmanagers")["data"]
            assert len(known["activeAlertmanagers"]) == 1
            assert asked(server, "http://alertmanager:9093/api/v2/status")["config"]
            compose(environment, "stop", "holdfast", files=files)
            assert containers.run("podman", "wait", server.name) == "0"
        finally:
            compose(environment, "down", "--volumes", "--timeout", "10", files=files)


def ready_samples(server: Running) -> list[str]:
    """The values of the server's READY as Prometheus has them."""
    query = "http://prometheus:9090/api/v1/query?query=holdfast_state%7Bstate%3D%22READY%22%7D"
    answer = asked(server, query)
    return [one["value"][1] for one in answer["data"]["result"]] if answer else []
