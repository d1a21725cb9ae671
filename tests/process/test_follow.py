"""`holdfast follow` as a process, with a real head and a stand-in for the ranks."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import stand_in_ranks
from authorities import Authority
from holdfast.nodes.actions import GenerationLost, NodeLeft
from holdfast.nodes.facts import node_facts
from node_pairs import FACTS, KEY
from servers import Server, descendants, has_ended, reserved_port, running, title_of, wait_until
from threaded_head import ThreadedHead, threaded_head

FOLLOW = (sys.executable, str(Path(stand_in_ranks.__file__)), "follow")
SERVE = (*FOLLOW[:-1], "serve")
DEADLINE_SECONDS = 90.0
NAME = "spark-2"
ASKED = "leaving when the head has ended the engine"
"""Part of the log of a follower that lets its head drain."""


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """The key that the head has too."""
    path = tmp_path / "node.key"
    path.write_bytes(KEY)
    path.chmod(0o600)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory that is a model, as far as a follower looks."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture
def head(model: Path) -> Iterator[ThreadedHead]:
    """A head that waits for one follower."""
    with threaded_head(model) as found:
        yield found


def following(
    directory: Path,
    port: int,
    key_file: Path,
    *flags: str,
    own_port: int = 0,
    environment: Mapping[str, str] | None = None,
) -> AbstractContextManager[Server]:
    """A follower of the head at that port, with its temporary files in `directory/tmp`."""
    temporary = directory / "tmp"
    temporary.mkdir(exist_ok=True)
    given = (f"127.0.0.1:{port}", "--node-key-file", str(key_file), "--node-name", NAME, *flags)
    variables = {"TMPDIR": str(temporary), **(environment or {})}
    return running(directory, *given, command=FOLLOW, environment=variables, port=own_port)


def until_state(follower: Server, state: str) -> dict[str, Any]:
    """Its report, once it is in that state."""
    follower.until(lambda: follower.status["state"] == state, state, deadline_seconds=90)
    return follower.status


def until_ready(follower: Server) -> None:
    follower.until_ready(deadline_seconds=DEADLINE_SECONDS)


def ranks_process(follower: Server) -> psutil.Process:
    """The process that runs its ranks."""

    def found() -> list[psutil.Process]:
        family = descendants(follower.process.pid)
        return [one for one in family if " stand_in_ranks " in title_of(one)]

    return follower.until(found, "the process of the ranks", deadline_seconds=DEADLINE_SECONDS)[0]


def until_ended(*processes: psutil.Process) -> None:
    wait_until(
        lambda: all(map(has_ended, processes)),
        deadline_seconds=DEADLINE_SECONDS,
        what=lambda: f"still running: {processes}",
    )


def codes(follower: Server) -> dict[str, int]:
    """What the health routes answer."""
    paths = ("/livez", "/readyz", "/health", "/ping")
    return {path: follower.get(path).status_code for path in paths}


UNREADY = {"/livez": 200, "/readyz": 503, "/health": 503, "/ping": 503}


def test_a_follower_without_a_head_waits_and_says_so(tmp_path: Path, key_file: Path) -> None:
    """It is alive, and not ready; the head may be started later."""
    with reserved_port() as port, following(tmp_path, port, key_file) as follower:
        follower.until(lambda: follower.status["problem"], "a problem")
        assert codes(follower) == UNREADY
        expected = f"not connected to the head: cannot connect to the head at 127.0.0.1:{port}"
        assert follower.get("/readyz").json()["reason"].startswith(expected)
        assert follower.metric("node_head_connected") == 0


def test_a_follower_joins_runs_its_ranks_and_is_ready(
    tmp_path: Path, key_file: Path, head: ThreadedHead
) -> None:
    """Ready only once the ranks have locked their workspaces; the page has their numbers."""
    with following(tmp_path, head.port, key_file) as follower:
        head.until_complete()
        until_state(follower, "waiting")
        assert codes(follower) == UNREADY
        assert follower.metric("node_head_connected") == 1

        head.keep_running(str(tmp_path / "locked"))
        follower.until(lambda: follower.status["workspace"], "a rank")
        assert follower.get("/readyz").json()["reason"].startswith("starting generation ")
        assert codes(follower) == UNREADY

        (tmp_path / "locked").touch()
        until_ready(follower)
        assert set(codes(follower).values()) == {200}
        assert follower.metric("node_generation") >= 1
        assert follower.metric("workspace_locked", engine="0", rank="1") == 1
        assert any(name == "process_resident_memory_bytes" for name, _ in follower.metrics())
        status = follower.status
        assert (status["node"], status["state"]) == (NAME, "running")
        assert status["head"] == f"127.0.0.1:{head.port}"
        assert status["facts"] == asdict(node_facts(""))
        assert [rank["rank"] for rank in status["workspace"]] == [1]


def test_a_follower_has_neither_vllm_nor_a_fork_server(
    tmp_path: Path, key_file: Path, head: ThreadedHead
) -> None:
    """It outlives engines, so it must not hold what they need: it is small, and has one child."""
    with following(tmp_path, head.port, key_file) as follower:
        head.keep_running()
        until_ready(follower)
        ranks = ranks_process(follower)
        others = descendants(follower.process.pid) - {ranks}
        assert all("resource_tracker" in title_of(one) for one in others)
        maps = Path(f"/proc/{follower.process.pid}/maps").read_text()
        assert "libtorch" not in maps
        assert "/vllm/" not in maps


def test_there_is_no_other_route(tmp_path: Path, key_file: Path) -> None:
    """Clients of the model belong at the head."""
    with reserved_port() as port, following(tmp_path, port, key_file) as follower:
        for path in ("/v1/models", "/startupz", "/admin/state"):
            assert follower.get(path).status_code == 404


def test_a_follower_whose_ranks_die_tells_the_head_and_runs_the_next(
    tmp_path: Path, key_file: Path, head: ThreadedHead
) -> None:
    """It stays, and is ready again."""
    with following(tmp_path, head.port, key_file) as follower:
        head.keep_running()
        until_ready(follower)
        generation = follower.metric("node_generation")
        ranks_process(follower).kill()
        head.until(lambda scene: any(isinstance(one, GenerationLost) for one in scene.reports))
        follower.until(lambda: follower.metric("node_generation") > generation, "the next")
        until_ready(follower)


def test_a_follower_outlives_its_head(tmp_path: Path, key_file: Path, model: Path) -> None:
    """It ends the ranks, and joins the next head at the same address."""
    with reserved_port() as port, following(tmp_path, port, key_file) as follower:
        with threaded_head(model, port=port) as head:
            head.keep_running()
            until_ready(follower)
            ranks = ranks_process(follower)
        until_ended(ranks)
        assert codes(follower)["/readyz"] == 503
        with threaded_head(model, port=port) as head:
            head.keep_running()
            until_ready(follower)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_ranks_first_and_leaves_nothing(
    tmp_path: Path, key_file: Path, head: ThreadedHead, number: signal.Signals
) -> None:
    """Exit 0, though the ranks ignore SIGTERM; the head hears why the node has left."""
    with following(tmp_path, head.port, key_file) as follower:
        head.keep_running()
        until_ready(follower)
        family = descendants(follower.process.pid)
        assert follower.stop(number) == 0
        until_ended(*family)
        left = NodeLeft(NAME, "it leaves: its process was asked to end")
        head.until(lambda scene: left in scene.reports)
        assert "holdfast: error" not in follower.log
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_signal_ends_the_ranks_once_the_head_has_drained(
    tmp_path: Path, key_file: Path, model: Path
) -> None:
    """Both get it at the same moment, and requests that the head drains need the ranks."""
    drain = "--head-drain-timeout=3600"
    with reserved_port() as port, following(tmp_path, port, key_file, drain) as follower:
        with threaded_head(model, port=port) as head:
            head.keep_running()
            until_ready(follower)
            ranks = ranks_process(follower)
            follower.process.terminate()
            follower.until(lambda: ASKED in follower.log, "a word about the drain")
            assert codes(follower)["/readyz"] == 200
        assert follower.wait() == 0
        until_ended(ranks)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_follower_does_not_wait_for_a_drain_without_end(
    tmp_path: Path, key_file: Path, head: ThreadedHead
) -> None:
    """The head may not have been asked to end."""
    drain = "--head-drain-timeout=0.5"
    with following(tmp_path, head.port, key_file, drain) as follower:
        head.keep_running()
        until_ready(follower)
        assert follower.stop() == 0
        left = NodeLeft(NAME, "it leaves: its process was asked to end")
        head.until(lambda scene: left in scene.reports)


def test_a_signal_ends_a_follower_that_waits_for_its_head(tmp_path: Path, key_file: Path) -> None:
    """At once, since nothing runs."""
    with reserved_port() as port, following(tmp_path, port, key_file) as follower:
        assert follower.url
        assert follower.stop() == 0


def test_a_signal_ends_a_follower_whose_file_system_hangs(
    tmp_path: Path, key_file: Path, model: Path
) -> None:
    """A read that never ends does not keep it: here of a pipe that nobody writes to."""
    facts = node_facts(str(model))
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    with (
        threaded_head(model, facts=facts) as head,
        following(tmp_path, head.port, key_file) as follower,
    ):
        until_state(follower, "joining")
        assert follower.stop() == 0


def test_a_signal_ends_a_follower_whose_ranks_cannot_be_ended(
    tmp_path: Path, key_file: Path, head: ThreadedHead
) -> None:
    """At its deadline, as a second signal would: here what they leave cannot be removed."""
    variable = {stand_in_ranks.LEAVE_VARIABLE: "0.5"}
    with following(tmp_path, head.port, key_file, environment=variable) as follower:
        head.keep_running()
        until_ready(follower)
        ranks = ranks_process(follower)
        assert follower.stop() == 128 + signal.SIGTERM
        until_ended(ranks)
        assert "did not end within 0.5 s" in follower.log
    assert list((tmp_path / "tmp").iterdir()) == []


def test_another_key_is_exit_2(tmp_path: Path, key_file: Path, head: ThreadedHead) -> None:
    """With one line that says what to do."""
    key_file.write_text("another key of more than 32 letters".replace(" ", "-"))
    with following(tmp_path, head.port, key_file) as follower:
        assert follower.wait() == 2
        assert follower.last_line.startswith("holdfast: error: the head has another key. Remedy: ")
        assert follower.log.count("holdfast: error") == 1


@pytest.mark.parametrize("name", ["holdfast_version", "vllm_version", "model_digest"])
def test_what_differs_from_the_head_is_exit_2(
    tmp_path: Path, key_file: Path, model: Path, name: str
) -> None:
    """Before weights are read, with one line that names the node."""
    facts = replace(node_facts(str(model)), **{name: "another"})
    with (
        threaded_head(model, facts=facts) as head,
        following(tmp_path, head.port, key_file) as follower,
    ):
        assert follower.wait() == 2
        assert NAME in follower.last_line
        assert " Remedy: " in follower.last_line


def test_a_model_that_is_not_here_is_exit_2(tmp_path: Path, key_file: Path) -> None:
    """With its path on the head."""
    with (
        threaded_head(tmp_path / "elsewhere", facts=FACTS) as head,
        following(tmp_path, head.port, key_file) as follower,
    ):
        assert follower.wait() == 2
        assert f"the model at {tmp_path / 'elsewhere'} cannot be read" in follower.last_line


def test_flags_that_mean_something_else_here_are_exit_2(
    tmp_path: Path, key_file: Path, head: ThreadedHead
) -> None:
    """With the line of the process that found it; the head waits for another node."""
    variable = {stand_in_ranks.UNFIT_VARIABLE: "1"}
    with following(tmp_path, head.port, key_file, environment=variable) as follower:
        head.keep_running()
        assert follower.wait() == 2
        line = "this node has other GPUs. Remedy: use the same ones."
        assert follower.last_line == f"holdfast: error: {line}"
        left = NodeLeft(NAME, f"it leaves: {line}")
        head.until(lambda scene: left in scene.reports)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_an_address_in_use_is_exit_6(tmp_path: Path, key_file: Path) -> None:
    """With the flags that choose another."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with following(tmp_path, 1, key_file, own_port=port) as follower:
            assert follower.wait() == 6
            assert f"127.0.0.1:{port} is in use by another process" in follower.last_line
            assert "--uds" not in follower.last_line


def test_a_key_that_is_too_short_is_exit_2(tmp_path: Path, key_file: Path) -> None:
    """Before anything is opened."""
    key_file.write_text("short")
    with following(tmp_path, 1, key_file) as follower:
        assert follower.wait() == 2
        assert "the key has fewer than 32 characters. Remedy: " in follower.last_line


def headless(port: int, key_file: Path) -> tuple[str, ...]:
    """vLLM's way to start a follower of the head at that port."""
    flags = ("--nnodes=2", "--node-rank=1", "--headless", "--master-addr=127.0.0.1")
    ours = (f"--node-port={port}", f"--node-key-file={key_file}")
    return ("/no/such/model", "--tensor-parallel-size", "2", *flags, *ours)


def test_the_keys_of_a_copied_command_line_are_hidden(
    tmp_path: Path, key_file: Path, head: ThreadedHead
) -> None:
    """`ps` does not show them, and the ranks do not get them."""
    given = (*headless(head.port, key_file), "--api-key=hush-flag")
    variables = {"VLLM_API_KEY": "hush-variable", "HOLDFAST_ADMIN_API_KEY": "hush-admin"}
    with running(tmp_path, *given, command=SERVE, environment=variables) as follower:
        head.keep_running()
        until_ready(follower)
        processes = [follower.process.pid, *(one.pid for one in descendants(follower.process.pid))]
        assert len(processes) > 1
        shown = [
            Path(f"/proc/{pid}/{part}").read_bytes()
            for pid in processes
            for part in ("cmdline", "environ")
        ]
        assert [one for one in shown if b"hush" in one] == []


def test_vllms_way_to_start_a_follower_joins_too(
    tmp_path: Path, key_file: Path, head: ThreadedHead
) -> None:
    """The model and the flags that are given with it come from the head."""
    with running(tmp_path, *headless(head.port, key_file), command=SERVE) as follower:
        head.until_complete()
        assert "have no effect" in follower.log
        assert until_state(follower, "waiting")["head"] == f"127.0.0.1:{head.port}"


def test_a_follower_checks_the_certificate_of_its_head(
    tmp_path: Path, key_file: Path, model: Path
) -> None:
    """It joins the head that its authority vouches for, and stays away from any other."""
    authority = Authority.named("nodes")
    ca = authority.write(tmp_path / "ca.pem")
    stranger = Authority.named("others").write(tmp_path / "others.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue(tmp_path / "tls", "head", for_server=True))
    with threaded_head(model, context=context) as head:
        with following(tmp_path, head.port, key_file, f"--ssl-ca-certs={stranger}") as follower:
            follower.until(lambda: "certificate" in follower.status["problem"], "a refusal")
            assert codes(follower) == UNREADY
        with following(tmp_path, head.port, key_file, f"--ssl-ca-certs={ca}"):
            head.until_complete()


def test_the_health_check_asks_a_follower(tmp_path: Path, key_file: Path) -> None:
    """As Docker runs it: not ready while there is no head."""
    with reserved_port() as port, following(tmp_path, port, key_file) as follower:
        own = follower.url.rpartition(":")[2]
        check = [sys.executable, "-m", "holdfast", "health", f"--port={own}"]
        done = subprocess.run(check, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, "503" in done.stdout) == (1, True)
