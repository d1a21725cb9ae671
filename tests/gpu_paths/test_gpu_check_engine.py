"""What the kit reads from what the workers of a server have written, and from the device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from gpu_check import subject_protocol
from gpu_check.engine import (
    budget,
    device_memory,
    order,
    packages,
    recovery,
    servers,
    subjects,
    witness,
)
from gpu_check.records import CheckFailedError, CheckSkippedError, Measured
from gpu_check_runs import H200, MACHINE
from holdfast.workspace.plan import MIB

ADDED = witness.ADDED_BYTES


def an_engine(directory: Path, *events: tuple[str, Mapping[str, int]]) -> subjects.Engine:
    """An engine with one worker that has written these events."""
    lines = [
        json.dumps(asdict(witness.Event(7, 0, name, float(at), dict(sizes))))
        for at, (name, sizes) in enumerate(events)
    ]
    (directory / "7.events").write_text("\n".join(lines) + "\n")
    nobody: Any = None
    errand = subject_protocol.Errand("growing", (), str(directory), "", MACHINE, 1.0)
    return subjects.Engine(nobody, errand, directory, 1.0)


def with_device(engine: subjects.Engine, *, is_integrated: bool) -> subjects.Engine:
    """The same on a machine with one GPU."""
    machine = replace(MACHINE, devices=(replace(H200, is_integrated=is_integrated),))
    return replace(engine, errand=replace(engine.errand, machine=machine))


def happened(*names: str) -> list[tuple[str, Mapping[str, int]]]:
    """Events without sizes."""
    return [(name, {}) for name in names]


def test_the_right_order_passes(tmp_path: Path) -> None:
    """What happens again later does not matter."""
    names = ("reserve", "sized", "reserve", "seal", "retire", "lock", "retire")
    engine = an_engine(tmp_path, *happened(*names))
    assert order.locked(engine) == [Measured("events of rank 0", ", ".join(names))]
    assert order.sealed(engine) == [Measured("events of rank 0", ", ".join(names))]


@pytest.mark.parametrize(
    ("check", "names"),
    [
        (order.locked, ("sized", "reserve", "lock")),
        (order.locked, ("reserve", "lock", "sized")),
        (order.locked, ("reserve", "sized")),
        (order.sealed, ("retire", "seal", "lock")),
        (order.sealed, ("seal", "lock", "retire")),
    ],
)
def test_a_wrong_order_fails(
    check: Callable[[subjects.Engine], object], names: tuple[str, ...], tmp_path: Path
) -> None:
    """The reason has what the process did."""
    with pytest.raises(CheckFailedError, match=", ".join(names)):
        check(an_engine(tmp_path, *happened(*names)))


def test_a_worker_that_wrote_nothing_fails(tmp_path: Path) -> None:
    """Silence is not an order."""
    (tmp_path / "7.events").touch()
    with pytest.raises(CheckFailedError, match="no worker has written"):
        order.locked(an_engine(tmp_path))


@pytest.mark.parametrize(
    ("lost_bytes", "peak_bytes", "is_right"),
    [(ADDED, 0, True), (ADDED + 512, 512, True), (ADDED - 1, 0, False), (0, 0, False)],
)
def test_the_budget_is_compared_to_the_byte(
    lost_bytes: int, peak_bytes: int, is_right: bool, tmp_path: Path
) -> None:
    """What the peak of the activations changed is not of the reservation."""
    sizes = {"workspace_bytes": 18 * MIB, "available_bytes": 100 * MIB, "peak_bytes": MIB}
    after = {
        "workspace_bytes": 18 * MIB + ADDED,
        "available_bytes": 100 * MIB - lost_bytes,
        "peak_bytes": MIB + peak_bytes,
    }
    engine = an_engine(tmp_path, ("sized", sizes), ("sized", after))
    if is_right:
        assert Measured("reserved in between", ADDED, "bytes") in budget.check(engine)
    else:
        reason = f"{ADDED} bytes more were reserved.* is something else running on the GPU[?]"
        with pytest.raises(CheckFailedError, match=reason):
            budget.check(engine)


def test_no_budget_is_compared_in_the_memory_of_the_host(tmp_path: Path) -> None:
    """What GB10 has free others take and free meanwhile: the check is skipped, for that reason."""
    sizes = {"workspace_bytes": 18 * MIB, "available_bytes": 100 * MIB}
    after = {"workspace_bytes": 18 * MIB + ADDED, "available_bytes": 101 * MIB}
    engine = an_engine(tmp_path, ("sized", sizes), ("sized", after))
    with pytest.raises(CheckSkippedError, match="shares the host's memory"):
        budget.check(with_device(engine, is_integrated=True))
    with pytest.raises(CheckFailedError, match=f"{ADDED} bytes more were reserved"):
        budget.check(with_device(engine, is_integrated=False))


def test_the_plugins_of_this_checkout_are_found_in_their_order(tmp_path: Path) -> None:
    """Holdfast's own first, installed or not; then the kit's, which look at what those did."""
    folder = packages.make(tmp_path)
    program = (
        "from importlib.metadata import entry_points\n"
        "for e in entry_points(group='vllm.general_plugins'): print(e.name, e.load().__module__)\n"
        "import holdfast; print(holdfast.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    *points, file = done.stdout.splitlines()
    assert points[:4] == [
        "holdfast holdfast.worker.plugin",
        "holdfast_demo holdfast.demo",
        "holdfast_gpu_check gpu_check.engine.witness",
        "holdfast_gpu_check_lock gpu_check.engine.cpu_lock",
    ]
    assert file.startswith(str(folder))


def test_memory_that_does_not_come_back_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the killed engine while the next one runs, and of the server when it has stopped."""
    monkeypatch.setattr(device_memory, "used_bytes", lambda: 1 << 30)
    engine = with_device(an_engine(tmp_path), is_integrated=False)
    with pytest.raises(CheckSkippedError, match="no engine was replaced"):
        recovery.memory_returned(engine)
    stopped: Any = Stopped()
    full = {"before": 1 << 30, "first engine": 5 << 30, "second engine": 5 << 30}
    assert recovery.memory_returned(replace(engine, server=stopped, readings=dict(full)))
    on_gb10 = replace(with_device(engine, is_integrated=True), readings=dict(full))
    with pytest.raises(CheckSkippedError, match="page cache"):
        recovery.memory_returned(on_gb10)
    leaking = {**full, "second engine": 9 << 30}
    with pytest.raises(CheckFailedError, match=r"second engine: .* more are in use"):
        recovery.memory_returned(replace(engine, server=stopped, readings=leaking))


class Stopped:
    """A server that ends as it is asked to."""

    def stop(self) -> int:
        """The exit code."""
        return 0


def test_a_server_that_ends_at_once_is_quoted(tmp_path: Path) -> None:
    """Its last line has cause and remedy; nothing of it is left running."""
    (tmp_path / "ends.py").write_text("import sys; print('on its way'); sys.exit('error: no')")
    with (
        servers.running("ends", ("ends",), {}, tmp_path) as server,
        pytest.raises(CheckFailedError, match="exit code 1 before it was ready") as caught,
    ):
        server.until(lambda: False, "ready", 60)
    assert str(caught.value).endswith("; its last line: error: no")
    assert "on its way" in caught.value.log_tail


ANSWERS = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[1].removeprefix("--port="))), Handler).serve_forever()
"""


def test_a_proxy_of_the_shell_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not know the servers of this machine."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    (tmp_path / "answers.py").write_text(ANSWERS)
    with servers.running("answers", ("answers",), {}, tmp_path, servers.free_port()) as server:
        server.until(lambda: server.answers_200("/health"), "ready", 60)
