"""nginx and Envoy with the files that are shipped, in which only the addresses are others."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from ops.prometheus import tool
from routed_replicas import FILES
from servers import Server, reserved_port

DEADLINE_SECONDS = 60.0
Proxy = Callable[[Path, Sequence[int]], AbstractContextManager[Server]]


def nginx_prefix(directory: Path) -> list[str]:
    """Return the flags with which nginx keeps all files of its own below `directory`."""
    for name in ("var/lib/nginx", "var/log/nginx", "var/lock", "run"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    return ["-p", f"{directory}/"]


@contextmanager
def nginx(
    directory: Path, ports: Sequence[int], changes: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Run it before the replicas with these ports, with parts of its file changed."""
    with reserved_port() as port:
        path = directory / "nginx.conf"
        text = _with_addresses((FILES / "nginx.conf").read_text(), ports, r"10.0.0.{}:8000")
        for old, new in (changes or {}).items():
            text = _once(text, old, new)
        path.write_text(_once(text, "listen 8080;", f"listen 127.0.0.1:{port};"))
        # Else its workers are nobody, who cannot read the directory of a test.
        user = "" if os.geteuid() else " user root;"
        flags = (*nginx_prefix(directory), "-c", str(path), "-g", f"daemon off;{user}")
        with _running(directory, tool("nginx"), *flags, port=port) as proxy:
            yield proxy


@contextmanager
def envoy(directory: Path, ports: Sequence[int]) -> Iterator[Server]:
    """Run it before the replicas with these ports."""
    with reserved_port() as port:
        path = directory / "envoy.yaml"
        of_envoy = "address: 10.0.0.{}, port_value: 8000"
        text = _with_addresses((FILES / "envoy.yaml").read_text(), ports, of_envoy)
        ours = f"address: 127.0.0.1, port_value: {port}"
        path.write_text(_once(text, "address: 0.0.0.0, port_value: 8080", ours))
        flags = ("-c", str(path), "--disable-hot-restart", "--concurrency", "1")
        with _running(directory, tool("envoy"), *flags, port=port) as proxy:
            yield proxy


def _with_addresses(text: str, ports: Sequence[int], form: str) -> str:
    for number, port in enumerate(ports, start=1):
        old = form.format(number)
        new = re.sub(r"10\.0\.0\.\d", "127.0.0.1", old).replace("8000", str(port))
        text = _once(text, old, new)
    return text


def _once(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, old
    return text.replace(old, new)


@contextmanager
def _running(directory: Path, *command: str, port: int) -> Iterator[Server]:
    log_path = directory / "proxy.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
    server = Server(process, log_path, port)
    try:
        server.until(lambda: server.get("/").status_code == 404, "the proxy")
        yield server
    finally:
        server.close()
        process.terminate()
        process.wait(DEADLINE_SECONDS)
