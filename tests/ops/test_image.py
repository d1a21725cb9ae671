"""The Dockerfile, as far as it shows without a build: ops_tests/ builds and runs it."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from holdfast import __version__, cli
from holdfast.doctor.deployments import STATE_DIRECTORY
from holdfast.settings.variable_names import IMAGE_VARIABLE
from ops.prometheus import tool
from ops.queries import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
TARGETS = ("cpu", "cuda")
every_target = pytest.mark.parametrize("target", TARGETS)


def stage(name: str) -> str:
    """The instructions of one stage, comments left out, each on one line."""
    text = re.sub(r"^ *#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    stages = re.split(r"^FROM \S+ AS (\w[\w-]*)\n", text, flags=re.MULTILINE)[1:]
    return re.sub(r" +", " ", dict(zip(stages[::2], stages[1::2], strict=True))[name])


def instruction(target: str, name: str) -> str:
    """The arguments of an instruction that a stage has once."""
    (found,) = re.findall(rf"^{name} (.*)$", stage(target), re.MULTILINE)
    return str(found)


def environment(target: str) -> str:
    """The variables that a stage sets, in their order."""
    return " ".join(re.findall(r"^ENV (.*)$", stage(target), re.MULTILINE))


@pytest.mark.tools
def test_hadolint_has_no_complaint() -> None:
    """At any severity."""
    done = subprocess.run(
        [tool("hadolint"), "--failure-threshold", "style", str(ROOT / "Dockerfile")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


@every_target
def test_the_server_is_the_first_process(target: str) -> None:
    """It is started without a shell, so that SIGTERM reaches it."""
    assert json.loads(instruction(target, "ENTRYPOINT")) == ["holdfast"]
    assert instruction(target, "STOPSIGNAL") == "SIGTERM"
    command = json.loads(instruction(target, "CMD"))
    assert command[0] == "serve"
    if "--help" not in command:
        cli.parse_serve(command[1:], {})


@every_target
def test_it_runs_as_nobody_in_particular(target: str) -> None:
    """As a user with a number, which Kubernetes can check not to be root, last of all."""
    assert re.findall(r"^USER (.*)$", stage(target), re.MULTILINE)[-1] == "10001:10001"
    assert "useradd --uid 10001 " in stage(target)


@every_target
def test_dependencies_come_before_the_code(target: str) -> None:
    """A change of the code leaves the layers of the locked dependencies as they are."""
    text = stage(target)
    code = text.index("/wheels/*.whl")
    dependencies = "COPY --from=cpu-dependencies" if target == "cpu" else "ours.txt"
    assert text.index(dependencies) < code
    assert "COPY server" not in text
    assert "server" not in stage("cpu-dependencies")


def test_the_wheel_is_built_from_what_the_context_has() -> None:
    """Every file that is copied is let through by .dockerignore, and nothing else is."""
    copied = {
        source.rstrip("/")
        for words in re.findall(r"^COPY (?!--from=)(.*)$", DOCKERFILE, re.MULTILINE)
        for source in words.split()[:-1]
    }
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == copied
    assert all((ROOT / source).exists() for source in copied)


def test_the_pins_for_vllms_image_are_ours() -> None:
    """What is added to it beside our wheel is pinned, and so is what that needs."""
    (found,) = re.findall(r"grep -E '\^\(([a-z|-]+)\)=='", stage("cuda"))
    names = set(found.split("|"))
    pins = (ROOT / "requirements" / "cpu.txt").read_text()
    assert all(re.search(rf"^{name}==", pins, re.MULTILINE) for name in names)
    assert names >= {"cryptography", "platformdirs", "rich"}
    needed = {need for name in names for need in needs(name)}
    assert needed <= names


def needs(name: str) -> set[str]:
    """Return what a distribution needs here, without its extras."""
    wanted = [Requirement(text) for text in requires(name) or ()]
    return {
        one.name.lower()
        for one in wanted
        if one.marker is None or one.marker.evaluate({"extra": ""})
    }


def test_the_cuda_image_is_not_made_without_what_we_ask_for(tmp_path: Path) -> None:
    """The build fails where pip finds that something of ours is missing or too old."""
    (run,) = re.findall(r"^RUN .*/wheels/\*\.whl.*$", stage("cuda"), re.MULTILINE)
    (check,) = re.findall(r"&& (\{ python3 -m pip check .*?; \})", run)
    check = check.replace("/tmp/", f"{tmp_path}/")  # noqa: S108 - of the image
    for complaint, code in (("vllm 0.32.0 requires x", 0), ("holdfast 0.1.0 requires x", 1)):
        stub = f"python3() {{ echo '{complaint}, which is not installed.'; return 1; }}; "
        assert subprocess.run(["sh", "-c", stub + check], check=False).returncode == code


@every_target
def test_volumes_find_a_directory_of_the_user(target: str) -> None:
    """What is mounted over is there and belongs to the user, as a new volume will."""
    assert "HOME=/home/holdfast" in environment(target)
    made = re.findall(r'"\$\{HOME\}(/[^"]*)"', stage(target))
    places = {f"/home/holdfast{path}" for path in made}
    assert {STATE_DIRECTORY, "/home/holdfast/.cache/huggingface"} <= places


def test_what_is_compiled_stays_in_the_cache() -> None:
    """Whatever would go elsewhere by itself, as Humming's kernels and its scratch do."""
    variables = dict(re.findall(r"(\w+)=(\S+)", environment("cuda")))
    caches = ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "TILELANG_CACHE_DIR")
    places = (*caches, "HUMMING_CACHE_DIR", "HUMMING_TMP_DIR")
    assert all(variables[name].startswith("/home/holdfast/.cache/") for name in places)


def test_vllm_reports_no_usage() -> None:
    """It would write below `~/.config` first, which a read-only root does not allow."""
    assert "VLLM_NO_USAGE_STATS=1" in environment("cuda").split()


@every_target
def test_the_labels_say_what_it_is(target: str) -> None:
    """The version is that of the package, the base that of the stage."""
    labels = dict(re.findall(r'org\.opencontainers\.image\.([\w.]+)="([^"]*)"', stage(target)))
    assert labels["version"] == __version__
    assert labels["licenses"] == "Apache-2.0"
    assert labels["base.name"] == f"${{{target.upper()}_BASE}}"
    declared = re.findall(r"^ARG (\w+)", stage(target), re.MULTILINE)
    used = [text[2:-1] for text in labels.values() if text.startswith("$")]
    assert sorted([*used, "IMAGE"]) == sorted(declared)


@every_target
def test_the_name_of_the_image_reaches_the_server(target: str) -> None:
    """As a variable that `/statusz` shows."""
    assert f'{IMAGE_VARIABLE}="${{IMAGE}}"' in environment(target)


def test_both_targets_end_alike() -> None:
    """User, port, health check and entry point are the same."""
    for name in ("WORKDIR", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL", "ENTRYPOINT"):
        assert instruction("cpu", name) == instruction("cuda", name)


def test_the_cuda_image_has_the_vllm_that_the_package_asks_for() -> None:
    """The tag of the base is one of the versions in pyproject.toml."""
    (tag,) = re.findall(r"^ARG CUDA_BASE=\S+:v(\d+\.\d+\.\d+)$", DOCKERFILE, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (asked,) = map(Requirement, project["optional-dependencies"]["cuda"])
    assert asked.name == "vllm"
    assert asked.specifier.contains(tag)
