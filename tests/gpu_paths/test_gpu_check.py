"""The kit for a machine with a GPU, on one without: what can run runs, the rest is named."""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path

import jsonschema
import pytest
from vllm.v1.worker import workspace as vllm_workspace

from gpu_check import __main__ as kit
from gpu_check import (
    checks,
    lacks,
    records,
    report,
    subject_process,
    subject_protocol,
    survey,
    vllm_file,
)
from gpu_check.checks import CHECKS, SUBJECTS
from gpu_check.records import CheckResult, Machine, Measured, Report
from gpu_check_runs import H200, MACHINE, ROOT, run_gpu_check, status_of

PAGE = ROOT / "docs" / "gpu-check.md"
REPORT_PAGE = ROOT / "docs" / "gpu-report.md"
SCHEMA = json.loads((ROOT / "gpu_check" / "report.schema.json").read_text())
CORE = [check.name for check in CHECKS if check.subject == "manager" and not check.needs]
"""What needs no GPU of it."""
REPORTS = sorted((ROOT / "gpu_check" / "reports").glob("*.json"))
OF_TORCH = (
    "torch torchgen functorch triton numpy sympy mpmath networkx jinja2 markupsafe filelock fsspec "
    "typing_extensions cuda nvidia"
)
BLOCKER = """
import sys
ALLOWED = {{*sys.stdlib_module_names, "gpu_check", "holdfast", *{names!r}}}
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ALLOWED:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
"""


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_a_report_that_is_kept_is_in_the_page(path: Path) -> None:
    """It has the published shape, and docs/gpu-report.md has its counts and both of its tables."""
    kept = json.loads(path.read_text())
    jsonschema.validate(kept, SCHEMA)
    title, *lines = report.markdown(Report.from_record(kept)).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    page = REPORT_PAGE.read_text()
    assert [one for one in (path.name, title.rpartition(": ")[2], *rows) if one not in page] == []


def test_the_core_runs_on_a_cpu_and_names_what_it_leaves_out(tmp_path: Path) -> None:
    """Its report has the published shape, every check with its status, and every skip a reason."""
    code, written, output = run_gpu_check(tmp_path, "--only", *CORE, "growth_under_graphs")
    assert code == 0, output
    jsonschema.validate(written, SCHEMA)
    assert [check["name"] for check in written["checks"]] == [check.name for check in CHECKS]
    statuses = status_of(written)
    assert [name for name, status in statuses.items() if status == "passed"] == CORE
    assert set(statuses.values()) == {"passed", "skipped"}
    reasons = {check["name"]: check["reason"] for check in written["checks"]}
    assert reasons["growth_under_graphs"] == "torch sees no CUDA device"
    assert reasons["worst_case_proven"] == "not asked for"
    page = (tmp_path / "report.md").read_text()
    assert "| `growth_under_graphs` | manager | skipped | 0.0 | torch sees no CUDA device |" in page


def test_the_core_needs_torch_and_one_file_of_vllm_alone(tmp_path: Path) -> None:
    """Where nothing else can be imported it runs on the file that it is given."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(BLOCKER.format(names=OF_TORCH.split()))
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    given = str(Path(vllm_workspace.__file__))
    code, written, output = run_gpu_check(
        tmp_path, "--vllm", given, "--only", *CORE, environment={"PYTHONPATH": path}
    )
    assert code == 0, output
    assert [name for name, status in status_of(written).items() if status == "passed"] == CORE


def test_where_nothing_can_run_it_says_what_to_give(tmp_path: Path) -> None:
    """Without vLLM's file: the lack with its remedy on one line, every check skipped, exit 2."""
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    code, written, output = run_gpu_check(tmp_path, "--vllm", str(nothing), "--only", *CORE)
    assert code == 2
    assert set(status_of(written).values()) == {"skipped"}
    (line,) = [line for line in output.splitlines() if "workspace.py is not here" in line[:70]]
    assert line.startswith("lacking: ")
    assert "--vllm PATH" in line


def test_a_place_that_takes_no_report_is_refused_before_any_check(tmp_path: Path) -> None:
    """One line that names the flag and exit 2, and nothing was checked."""
    file = tmp_path / "file"
    file.touch()
    code, written, output = run_gpu_check(file / "report", "--only", *CORE)
    assert (code, written) == (2, {})
    (line,) = output.splitlines()
    assert line.startswith("error: the report cannot be written to --output ")


def test_the_schema_is_that_of_the_records() -> None:
    """Every record has its shape, with its fields and no others, all of them required."""
    shapes = {"Report": SCHEMA, **SCHEMA["$defs"]}
    published = {
        name: (set(shape["properties"]), set(shape["required"])) for name, shape in shapes.items()
    }
    made = [one for one in vars(records).values() if isinstance(one, type) and is_dataclass(one)]
    assert published == {
        one.__name__: ({f.name for f in fields(one)}, {f.name for f in fields(one)}) for one in made
    }
    subjects = SCHEMA["$defs"]["CheckResult"]["properties"]["subject"]["enum"]
    assert subjects == [subject.name for subject in SUBJECTS]


def test_every_check_can_be_found_and_is_named_once() -> None:
    """What the table names as functions is there."""
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    for path in [check.function for check in CHECKS] + [subject.opened for subject in SUBJECTS]:
        assert callable(subject_process._named(path))


def test_the_page_has_every_check_as_it_is() -> None:
    """docs/gpu-check.md says of each what it looks at, needs and proves, and of each subject."""
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert [row for row in rows if len(row) == 4] == [
        [f"| `{c.name}`", c.subject, lacks.named_needs(c), f"{c.proves} |"] for c in CHECKS
    ]
    named = [row[0] for row in rows if len(row) == 2]
    assert named == [f"| `{subject.name}`" for subject in SUBJECTS]


def test_make_takes_the_python_that_it_is_given_and_sets_nothing_up() -> None:
    """A machine with a GPU has its own torch and vLLM."""
    command = ["make", "--no-print-directory", "-n", "gpu-check", "PYTHON=other", "ARGS=--list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "exec other -m gpu_check --list\n"


# Where vLLM's one file comes from.


@pytest.mark.parametrize("form", ["file", "folder", "site", "wheel"])
def test_the_file_is_read_from_what_is_given(form: str, tmp_path: Path) -> None:
    """The file itself, vLLM's folder, the folder above it, or a wheel."""
    file = Path(vllm_workspace.__file__)
    given = {"file": file, "folder": file.parents[2], "site": file.parents[3]}
    if form == "wheel":
        given["wheel"] = tmp_path / "vllm-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl"
        with zipfile.ZipFile(given["wheel"], "w") as wheel:
            wheel.write(file, f"vllm/{vllm_file.MEMBER}")
    assert vllm_file.read(given[form]) == file.read_bytes()
    assert vllm_file.read(tmp_path / "nowhere") is None


def test_a_wheel_is_fetched_once_and_by_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where pip brings none that is an OSError; where one is, pip is not asked."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(OSError, match="pip could not download"):
        vllm_file.fetch(tmp_path, "vllm==0.32.*")
    wheel = tmp_path / "vllm-0.32.0-py3-none-any.whl"
    wheel.touch()
    assert vllm_file.fetch(tmp_path, "vllm==0.32.*") == wheel


@pytest.mark.parametrize("home", ["/", "~"])
def test_no_home_takes_nothing_from_a_report(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container, where it is the root, or where the user has none."""
    monkeypatch.setenv("HOME", home)
    failed = CheckResult("recovery", "growing", "", "failed", f"{tmp_path}/log: /dev/shm is full")
    assert kit._without_paths(failed, tmp_path).reason == "./log: /dev/shm is full"


# What a machine is, and what it lacks.

BROKEN_TORCH = """
class version:
    cuda = "13.0"

class cuda:
    def is_available(): return True
    def device_count(): return 1
    def get_device_properties(number): raise RuntimeError("CUDA error: device not ready")

__version__ = "2.13.0"
"""


def test_a_gpu_that_fails_does_not_hide_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine is one without a device, and says so."""
    (tmp_path / "torch.py").write_text(BROKEN_TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    machine = survey.survey()
    assert (machine.torch, machine.cuda, machine.devices) == ("2.13.0", "13.0", ())


@pytest.mark.parametrize(
    ("machine", "need", "what"),
    [
        (replace(MACHINE, torch=""), "torch", "torch cannot be imported by 3.12.3 of Python"),
        (MACHINE, "cuda", "torch sees no CUDA device"),
        (
            replace(MACHINE, devices=(H200,)),
            "two_devices",
            "torch sees 1 CUDA devices, and two are needed",
        ),
        (replace(MACHINE, vllm="", devices=(H200,)), "engine", "vLLM is not installed"),
        (
            replace(MACHINE, devices=(H200,), missing_requirements=("platformdirs",)),
            "engine",
            "Holdfast requires what is not installed: platformdirs",
        ),
        (
            replace(MACHINE, devices=(H200,), is_vllm_for_cpu=True),
            "engine",
            "vLLM is its build for CPUs beside a GPU",
        ),
        (MACHINE, "engine", "vLLM is its build for GPUs, and there is no CUDA device"),
    ],
)
def test_what_is_lacking_is_named(machine: Machine, need: checks.Need, what: str) -> None:
    """Each lack has its sentence, and a remedy."""
    found = lacks.lacks(machine, has_workspace_file=True)
    assert found[need].what == what
    assert found[need].remedy


def test_two_gpus_with_all_that_is_needed_lack_nothing() -> None:
    """Every check is made there."""
    found = lacks.lacks(replace(MACHINE, devices=(H200, H200)), has_workspace_file=True)
    assert found == {}
    assert [check.name for check in CHECKS if lacks.lack_of(check, found)] == []


# The report.


def a_report(*results: records.CheckResult) -> records.Report:
    """A report of an H200."""
    machine = replace(MACHINE, devices=(H200,))
    return records.Report(
        1,
        "0.1.0",
        "0123456789ab",
        "ab" * 32,
        "2026-01-02T03:04:05+00:00",
        60.0,
        machine,
        (),
        results,
    )


def test_a_failure_is_on_the_page_with_its_reason_and_its_log() -> None:
    """A person who gets only the page can say what happened."""
    failed = records.CheckResult(
        "growth_under_graphs", "manager", "p", "failed", "a|b", 1.0, (), "line 1\nline 2"
    )
    page = report.markdown(a_report(failed))
    assert page.startswith("# GPU check of Holdfast 0.1.0: 0 passed, 1 failed, 0 skipped\n")
    assert r"| `growth_under_graphs` | manager | failed | 1.0 | a\|b |" in page
    assert "    line 1\n    line 2" in page
    assert "| device | NVIDIA H200, capability 9.0, 139.7 GiB of its own |" in page


def test_a_record_is_read_as_it_was_written() -> None:
    """Results and requests cross processes as JSON."""
    result = records.CheckResult("a", "stock", "p", "passed", measured=(Measured("x", 1, "s"),))
    assert records.CheckResult.from_record(json.loads(json.dumps(asdict(result)))) == result


def test_an_errand_is_read_as_it_was_written(tmp_path: Path) -> None:
    """With the machine and its devices."""
    machine = replace(MACHINE, devices=(H200,))
    errand = subject_protocol.Errand("stock", ("a", "b"), "d", "f", machine, 2.0)
    errand.write(tmp_path / "errand")
    assert subject_protocol.Errand.read(tmp_path / "errand") == errand
