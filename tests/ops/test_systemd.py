"""The systemd units: systemd takes them, and they start, stop and restart as the server needs."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from holdfast import cli
from holdfast.doctor.manifest_checks import ENGINE_STOP_SECONDS
from holdfast.errors import ExitCode
from holdfast.nodes.addresses import ABSENCE_SECONDS
from holdfast.nodes.command_line import read_follow
from ops.queries import ROOT

UNITS = ROOT / "deploy" / "systemd"
HEAD = "holdfast-head.service"
FOLLOWER = "holdfast-follower.service"
ALONE = "holdfast.service"
OF_NODES = (HEAD, FOLLOWER)
NAMES = (*OF_NODES, ALONE)
REFUSED_PAUSE_SECONDS = 30
"""One that is refused again and again must not fill a log."""
PROGRAM = "/opt/holdfast/bin/holdfast"
PAGE = ROOT / "docs" / "several-nodes.md"
DEPLOYING = ROOT / "docs" / "deploying.md"
CREDENTIAL = "%d/node-key"
GPU_HIDING = {"PrivateDevices", "ProtectClock", "MemoryDenyWriteExecute", "ProcSubset"}

every_unit = pytest.mark.parametrize("name", NAMES)
every_server = pytest.mark.parametrize("name", [HEAD, ALONE])
Settings = dict[str, list[str]]


def settings(name: str) -> Settings:
    """Every setting of a shipped unit, by its key."""
    return settings_in((UNITS / name).read_text())


def settings_in(unit: str) -> Settings:
    """Every setting of a unit, by its key."""
    found: Settings = defaultdict(list)
    for line in unit.splitlines():
        if line and not line.startswith(("#", "[")):
            key, _, value = line.partition("=")
            found[key].append(value)
    return found


def variables(file: str) -> dict[str, str]:
    """The variables that a guide writes into a file of the environment."""
    if f"/etc/holdfast/{file}\n" in (text := DEPLOYING.read_text()):
        (line,) = re.findall(rf"echo '(.*)' \| sudo tee /etc/holdfast/{file}\n", text)
        return dict([line.split("=", 1)])
    _, found, text = PAGE.read_text().partition(f"`/etc/holdfast/{file}`")
    assert found
    (block,) = re.findall(r"\A[^\n]*\n\n((?: {4}.*\n)+)", text)
    return dict(line.strip().split("=", 1) for line in block.splitlines())


def command(name: str) -> list[str]:
    """What the unit starts, with the variables of the guide."""
    unit = settings(name)
    (start,) = unit["ExecStart"]
    (file,) = unit["EnvironmentFile"]
    given = variables(Path(file).name)
    words: list[str] = []
    for word in start.split():
        words += given[word[1:]].split() if word.startswith("$") else [word]
    return words


def unit_of_compose() -> str:
    """The unit that starts Compose at boot."""
    (unit,) = re.findall(r"^```ini\n(.*?)^```$", DEPLOYING.read_text(), re.MULTILINE | re.DOTALL)
    return str(unit)


@every_unit
def test_systemd_accepts_the_unit(name: str, tmp_path: Path) -> None:
    """It finds no unknown setting and no wrong value."""
    accept(name, (UNITS / name).read_text(), tmp_path)


def test_systemd_accepts_the_unit_of_the_guide(tmp_path: Path) -> None:
    """The one for Compose."""
    # Docker is not installed here.
    compose = re.sub(r"^(Requires|After)=.*\n", "", unit_of_compose(), flags=re.MULTILINE)
    accept("holdfast-compose.service", compose.replace("/usr/bin/docker", "/bin/true"), tmp_path)


def accept(name: str, text: str, directory: Path) -> None:
    """Have systemd read a unit, whose program is not installed here."""
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("no systemd-analyze here")
    unit = directory / name
    unit.write_text(text.replace(PROGRAM, "/bin/true"))
    done = subprocess.run(
        [analyze, "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    ours = [line for line in done.stderr.splitlines() if name in line]
    assert (done.returncode, ours) == (0, []), done.stderr


def test_the_head_is_the_one_of_the_guide() -> None:
    """Its flags are accepted, and it reads the key as a credential."""
    program, serve, *arguments = command(HEAD)
    assert (program, serve) == (PROGRAM, "serve")
    parsed = cli.parse_serve(arguments, {})
    assert parsed.node_count > 1
    assert parsed.nodes.key_file == Path(CREDENTIAL)


def test_the_follower_follows_that_head() -> None:
    """It connects to the address that the head gives as its own."""
    program, follow, *arguments = command(FOLLOWER)
    assert (program, follow) == (PROGRAM, "follow")
    parsed = read_follow(arguments, {})
    _, _, *of_head = command(HEAD)
    assert parsed.head_host == cli.parse_serve(of_head, {}).master_address
    assert parsed.key_file == Path(CREDENTIAL)


def test_the_unit_for_one_machine_needs_no_key() -> None:
    """It serves with the flags of the guide, and is otherwise that of a head."""
    program, serve, *arguments = command(ALONE)
    assert (program, serve) == (PROGRAM, "serve")
    assert cli.parse_serve(arguments, {}).node_count == 1
    changed = {"Description", "EnvironmentFile", "LoadCredential", "ExecStart"}
    unit, head = settings(ALONE), settings(HEAD)
    assert {key for key in {*head, *unit} if head.get(key) != unit.get(key)} == changed


def test_the_unit_of_compose_starts_the_files_of_the_guide() -> None:
    """From the directory that the guide names, with a model."""
    unit = settings_in(unit_of_compose())
    (start,) = unit["ExecStart"]
    files = re.findall(r"-f (\S+)", start)
    assert files
    assert all((ROOT / file).is_file() for file in files)
    assert unit["Environment"][0].startswith("MODEL=")


@pytest.mark.parametrize("name", OF_NODES)
def test_the_key_belongs_to_root(name: str) -> None:
    """systemd passes it on from where the guide puts it."""
    assert settings(name)["LoadCredential"] == ["node-key:/etc/holdfast/node-key"]
    assert "--mode 600 node-key /etc/holdfast/node-key\n" in PAGE.read_text()


@every_unit
def test_what_a_restart_cannot_help_is_not_restarted(name: str) -> None:
    """Everything else is, also what ends with 0 without having been stopped by systemd."""
    guide = (ROOT / "docs" / "operating.md").read_text()
    _, _, section = guide.partition("\n## Exit codes\n")
    rows = re.findall(r"^\| (\d) \|.*\| (yes|no)\b", section, re.MULTILINE)
    never = {code for code, is_restarted in rows if is_restarted == "no"} - {"0"}
    unit = settings(name)
    if name == FOLLOWER:  # which ends with 2 also because of what may change on the head
        never -= {"2"}
        assert int(unit["RestartSec"][0]) >= REFUSED_PAUSE_SECONDS
    assert never == set(unit["RestartPreventExitStatus"][0].split())
    assert unit["Restart"] == ["always"]


def test_a_head_without_its_address_is_started_until_it_has_it() -> None:
    """Each start waits for long enough that the limit on starts is not reached."""
    unit = settings(HEAD)
    assert str(int(ExitCode.ENGINE_START)) not in unit["RestartPreventExitStatus"][0].split()
    (hours,) = re.findall(r"^(\d+)h$", unit["StartLimitIntervalSec"][0])
    assert ABSENCE_SECONDS * int(unit["StartLimitBurst"][0]) > int(hours) * 3600


@every_server
def test_the_guides_say_how_to_start_again_beyond_the_limit(name: str) -> None:
    """A start by hand counts too, so systemd may refuse the one after a correction."""
    guide = DEPLOYING if name == ALONE else PAGE
    runbook = ROOT / "deploy" / "runbooks" / "holdfastrestartloop.md"
    guides = (guide, ROOT / "docs" / "operating.md", runbook, UNITS / name)
    texts = [" ".join(path.read_text().split()) for path in guides]
    assert "StartLimitBurst" in settings(name)
    assert all("systemctl reset-failed" in text for text in texts)
    assert f"systemctl reset-failed {name}" in texts[0]


@every_server
def test_the_server_may_drain(name: str) -> None:
    """It gets SIGTERM alone, and the time to drain and to end its engine."""
    unit = settings(name)
    _, _, *arguments = command(name)
    drain_seconds = cli.parse_serve(arguments, {}).supervision.drain_timeout_seconds
    assert unit["KillMode"] == ["mixed"]
    assert int(unit["TimeoutStopSec"][0]) >= drain_seconds + ENGINE_STOP_SECONDS


@every_unit
def test_the_death_of_a_worker_does_not_stop_the_unit(name: str) -> None:
    """Not even by the kernel for lack of memory: the engine is replaced."""
    assert settings(name)["OOMPolicy"] == ["continue"]


@every_unit
def test_the_gpu_is_not_hidden(name: str) -> None:
    """None of the settings is there that hide its devices or its driver, or forbid compilers."""
    assert GPU_HIDING.isdisjoint(settings(name))


def test_all_are_confined_equally() -> None:
    """What the head may not do, a follower and a server on one machine may not do either."""
    start = "NoNewPrivileges="
    texts = [(UNITS / name).read_text() for name in NAMES]
    head, follower, alone = (text.partition(start)[2].partition("\n\n")[0] for text in texts)
    assert head
    assert head == follower == alone


def test_every_unit_is_in_the_guide() -> None:
    """And here."""
    assert sorted(path.name for path in UNITS.iterdir()) == sorted(NAMES)
    assert all(f"../deploy/systemd/{name}" in PAGE.read_text() for name in OF_NODES)
    assert f"../deploy/systemd/{ALONE}" in DEPLOYING.read_text()
