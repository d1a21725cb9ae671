"""The kit for a machine with a GPU, on one without: what can run runs, the rest is named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
import torch
from vllm.v1.worker import workspace as vllm_workspace

from gpu_check import checks, errands, lacks, records, report, runner, vllm_file
from gpu_check.checks import CHECKS, SUBJECTS, Check, Subject
from gpu_check.core import bench, exhaustion, graphs, lives, refusals
from gpu_check.engine import budget, device_memory, order, packages, recovery, subjects, witness
from gpu_check.records import CheckFailedError, CheckSkippedError, Device, Machine, Measured
from gpu_kit import kit, status_of
from holdfast.workspace import growth
from holdfast.workspace import manager as holdfast_manager
from holdfast.workspace.footprint import Holdings
from holdfast.workspace.plan import MIB
from recorded_graphs import recorded
from servers import descendants, wait_until

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gpu-check.md"
SCHEMA = json.loads((ROOT / "gpu_check" / "report.schema.json").read_text())
CORE = ("refusal_words", "out_of_memory")
H200 = Device("NVIDIA H200", "9.0", 150_000_000_000, is_integrated=False)
MACHINE = Machine("Linux 6", "x86_64", "3.12.3", "2.13.0+cu130", "13.0", "580", "0.32.0")
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


@pytest.fixture
def on_graphs(monkeypatch: pytest.MonkeyPatch) -> bench.Bench:
    """The bench of a device with graphs."""
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    return bench.Bench(torch.device("cpu"), vllm_workspace, holdfast_manager, recorded)


@pytest.fixture
def work(tmp_path: Path) -> runner.Workplace:
    """A run that has a minute."""
    return runner.Workplace(tmp_path, None, MACHINE, 1.0, time.monotonic() + 60)


def test_the_core_runs_on_a_cpu_and_names_what_it_leaves_out(tmp_path: Path) -> None:
    """Its report has the published shape, every check with its status, and every skip a reason."""
    code, written, output = kit(tmp_path, "--only", *CORE, "growth_under_graphs")
    assert code == 0, output
    jsonschema.validate(written, SCHEMA)
    assert [check["name"] for check in written["checks"]] == [check.name for check in CHECKS]
    statuses = status_of(written)
    assert [statuses[name] for name in CORE] == ["passed", "passed"]
    assert set(statuses.values()) == {"passed", "skipped"}
    reasons = {check["name"]: check["reason"] for check in written["checks"]}
    assert reasons["growth_under_graphs"] == "torch sees no CUDA device"
    assert reasons["random_lives"] == "not asked for"
    page = (tmp_path / "report.md").read_text()
    assert "| `growth_under_graphs` | manager | skipped | 0.0 | torch sees no CUDA device |" in page


def test_the_core_needs_torch_and_one_file_of_vllm_alone(tmp_path: Path) -> None:
    """Where nothing else can be imported it runs on the file that it is given."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(BLOCKER.format(names=OF_TORCH.split()))
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    given = str(Path(vllm_workspace.__file__))
    code, written, output = kit(
        tmp_path, "--vllm", given, "--only", *CORE, environment={"PYTHONPATH": path}
    )
    assert code == 0, output
    assert [status_of(written)[name] for name in CORE] == ["passed", "passed"]


def test_where_nothing_can_run_it_says_what_to_give(tmp_path: Path) -> None:
    """Without vLLM's file: the lack with its remedy on one line, every check skipped, exit 2."""
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    code, written, output = kit(tmp_path, "--vllm", str(nothing), "--only", *CORE)
    assert code == 2
    assert set(status_of(written).values()) == {"skipped"}
    (line,) = [line for line in output.splitlines() if "workspace.py is not here" in line[:70]]
    assert line.startswith("lacking: ")
    assert "--vllm PATH" in line


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
    from gpu_check import subject_process

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


def test_nothing_is_said_of_gpus_before_there_is_a_report() -> None:
    """README says so, and no page pretends to be a report."""
    assert "**Holdfast has not run on a GPU.**" in (ROOT / "README.md").read_text()
    assert not (ROOT / "docs" / "gpu-report.md").exists()


# The checks of the manager, on a device whose graphs are recorded.


@pytest.mark.usefixtures("capturing")
@pytest.mark.parametrize(
    "check", [graphs.growth, graphs.no_growth_in_capture, exhaustion.check, refusals.check]
)
def test_a_right_manager_passes(
    on_graphs: bench.Bench, check: Callable[[bench.Bench], Sequence[Measured]]
) -> None:
    """Each check of the manager finds nothing, and says what it measured."""
    assert check(on_graphs)


def test_random_lives_of_a_right_manager_pass(
    on_graphs: bench.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is freed or written to."""
    monkeypatch.setattr(lives, "_LIVES", 5)
    assert lives.check(on_graphs)[0] == Measured("lives", 5)


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream is captured while a capture is recorded."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    monkeypatch.setattr(
        holdfast_manager, "_is_capturing", lambda _: _get_current_dispatch_mode() is not None
    )


def test_a_manager_that_frees_what_a_graph_holds_fails(
    on_graphs: bench.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without retired buffers a graph and a random life both meet freed memory."""
    monkeypatch.setattr(lives, "_LIVES", 5)
    monkeypatch.setattr(Holdings, "retire", lambda *_: None)
    with pytest.raises(RuntimeError, match="nothing is at"):
        graphs.growth(on_graphs)
    with pytest.raises(CheckFailedError, match="was freed"):
        lives.check(on_graphs)


def test_a_manager_that_grows_in_a_capture_fails(on_graphs: bench.Bench) -> None:
    """Here the manager is not told that the stream is captured."""
    with pytest.raises(CheckFailedError, match="grew while the stream was captured"):
        graphs.no_growth_in_capture(on_graphs)


def test_a_manager_with_other_words_fails(
    on_graphs: bench.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both texts stand in the reason."""
    monkeypatch.setattr(growth, "_verdict", lambda *_: "No.")
    with pytest.raises(CheckFailedError, match=r"not allowed after locking.*MB\. No\."):
        refusals.check(on_graphs)


def test_a_device_without_graphs_skips_them(on_graphs: bench.Bench) -> None:
    """A check that is run all the same says why it shows nothing."""
    with pytest.raises(CheckSkippedError, match="captures no graphs"):
        graphs.growth(replace(on_graphs, capture=None))


# Where vLLM's one file comes from.


@pytest.mark.parametrize("form", ["file", "folder", "site", "wheel"])
def test_the_file_is_read_from_what_is_given(form: str, tmp_path: Path) -> None:
    """The file itself, vLLM's folder, the folder above it, or a wheel."""
    import zipfile

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


# What a machine lacks.


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


# The runner, with subjects made for it.

FAKE_SUBJECT = """
import os, signal, subprocess, sys, threading
from contextlib import contextmanager
from gpu_check.records import CheckFailedError, Measured

class Bench:
    def tail(self): return "its last words"

@contextmanager
def opened(errand):
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield Bench()

@contextmanager
def broken(errand):
    raise OSError("it cannot be made")

def right(bench): return [Measured("answer", 42)]
def wrong(bench): raise CheckFailedError("it is not")
def broke(bench): return 1 / 0
def died(bench): os.kill(os.getpid(), signal.SIGKILL)
def hung(bench): threading.Event().wait()
def last(bench): return []
"""


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[Check]]:
    """Makes the table of a run out of functions of `FAKE_SUBJECT`."""
    package = tmp_path / "gpu_check_fakes"
    package.mkdir()
    (package / "gpu_check_fakes.py").write_text(FAKE_SUBJECT)

    def made(*names: str, opened: str = "opened") -> list[Check]:
        subject = Subject("stock", f"fakes:{opened}", (), 20.0)
        table = [Check(n, "stock", f"fakes:{n}", "something", (), 5.0) for n in names]
        monkeypatch.setattr(runner, "SUBJECTS", (subject,))
        _serve_fakes(package, subject, table, monkeypatch)
        return table

    return made


def _serve_fakes(
    package: Path, subject: Subject, table: Sequence[Check], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have the process of a subject find the fakes: by a module that Python runs at its start."""
    (package / "sitecustomize.py").write_text(
        "import gpu_check, gpu_check_fakes, sys\n"
        "from gpu_check import checks\n"
        "from gpu_check.checks import Check, Subject\n"
        "sys.modules['gpu_check.fakes'] = gpu_check_fakes\n"
        f"checks.SUBJECTS = ({subject!r},)\n"
        f"checks.CHECKS = {tuple(table)!r}\n"
    )
    path = [str(ROOT), str(package), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


def sleepers() -> list[int]:
    """The processes that the fake subjects have started."""
    from gpu_check import families

    return families.descendants(os.getpid())


def test_each_check_has_its_result_and_the_others_go_on(
    work: runner.Workplace, fakes: Callable[..., list[Check]]
) -> None:
    """One that fails, raises, hangs or takes its process down costs no other its result."""
    before = sleepers()
    table = fakes("right", "wrong", "broke", "died", "hung", "last")
    results = {result.name: result for result in runner.results(table, work)}
    assert {name: result.status for name, result in results.items()} == {
        "right": "passed",
        "wrong": "failed",
        "broke": "failed",
        "died": "failed",
        "hung": "failed",
        "last": "passed",
    }
    assert results["right"].measured == (Measured("answer", 42),)
    assert results["wrong"].reason == "it is not"
    assert results["wrong"].log_tail == "its last words"
    assert results["broke"].reason == "ZeroDivisionError: division by zero"
    assert results["died"].reason == "the process ended by signal SIGKILL in check died"
    assert results["hung"].reason == "check hung took more than 5 s"
    assert sleepers() == before


def test_a_subject_that_cannot_be_made_fails_its_checks_once(
    work: runner.Workplace, fakes: Callable[..., list[Check]]
) -> None:
    """Every check of it fails for the cause, and it is not tried for each anew."""
    results = list(runner.results(fakes("right", "wrong", opened="broken"), work))
    assert [result.status for result in results] == ["failed", "failed"]
    assert {result.reason for result in results} == {"OSError: it cannot be made"}
    assert len(list(work.directory.glob("*.errand"))) == 1


def test_when_the_time_of_the_run_is_over_what_is_left_fails(
    work: runner.Workplace, fakes: Callable[..., list[Check]]
) -> None:
    """Nothing is started any more."""
    over = replace(work, ends_at_seconds=time.monotonic() - 1)
    (result,) = runner.results(fakes("right"), over)
    assert (result.status, result.reason) == ("failed", "the time for the whole run was over")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_when_the_kit_is_ended(number: signal.Signals, tmp_path: Path) -> None:
    """Asked to, or killed so that it can do nothing itself."""
    command = [sys.executable, "-m", "gpu_check", "--output", str(tmp_path)]
    started = subprocess.Popen([*command, "--only", "random_lives"], cwd=ROOT)
    with started as process:
        (below,) = wait_until(
            lambda: [p for p in descendants(process.pid) if "subject_process" in command_line(p)],
            deadline_seconds=120,
            what=lambda: "the process of the subject",
        )
        process.send_signal(number)
        process.wait(60)
    wait_until(
        lambda: not below.is_running() or below.status() == psutil.STATUS_ZOMBIE,
        deadline_seconds=60,
        what=lambda: f"{below} is left",
    )


def command_line(process: psutil.Process) -> str:
    """Empty for a process that has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


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
    """So that whoever gets the page alone can say what happened."""
    failed = records.CheckResult(
        "growth_under_graphs", "manager", "p", "failed", "a|b", 1.0, (), "line 1\nline 2"
    )
    page = report.markdown(a_report(failed))
    assert page.startswith("# GPU check of Holdfast 0.1.0: 0 passed, 1 failed, 0 skipped\n")
    assert r"| `growth_under_graphs` | manager | failed | 1.0 | a\|b |" in page
    assert "    line 1\n    line 2" in page
    assert "| device | NVIDIA H200, capability 9.0, 139.7 GiB of its own |" in page


def test_a_record_is_read_as_it_was_written() -> None:
    """Results and errands cross processes as JSON."""
    result = records.CheckResult("a", "stock", "p", "passed", measured=(Measured("x", 1, "s"),))
    assert records.CheckResult.from_record(json.loads(json.dumps(asdict(result)))) == result


def test_an_errand_is_read_as_it_was_written(tmp_path: Path) -> None:
    """With the machine and its devices."""
    machine = replace(MACHINE, devices=(H200,))
    errand = errands.Errand("stock", ("a", "b"), "d", "f", machine, 2.0)
    errand.write(tmp_path / "errand")
    assert errands.Errand.read(tmp_path / "errand") == errand


# What is read from what the workers of a server have written.


def an_engine(directory: Path, *events: tuple[str, Mapping[str, int]]) -> subjects.Engine:
    """An engine of which one worker has written these events."""
    lines = [
        json.dumps(asdict(witness.Event(7, 0, name, float(at), dict(sizes))))
        for at, (name, sizes) in enumerate(events)
    ]
    (directory / "7.events").write_text("\n".join(lines) + "\n")
    nobody: Any = None
    return subjects.Engine(nobody, nobody, directory, 1.0)


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
    """Silence is no order."""
    (tmp_path / "7.events").touch()
    with pytest.raises(CheckFailedError, match="no worker has written"):
        order.locked(an_engine(tmp_path))


@pytest.mark.parametrize(
    ("lost_bytes", "peak_bytes", "is_right"),
    [(8 * MIB, 0, True), (8 * MIB + 512, 512, True), (8 * MIB - 1, 0, False), (0, 0, False)],
)
def test_the_budget_is_compared_to_the_byte(
    lost_bytes: int, peak_bytes: int, is_right: bool, tmp_path: Path
) -> None:
    """What the peak of the activations changed is not of the reservation."""
    sizes = {"workspace_bytes": 6 * MIB, "available_bytes": 100 * MIB, "peak_bytes": MIB}
    after = {
        "workspace_bytes": 14 * MIB,
        "available_bytes": 100 * MIB - lost_bytes,
        "peak_bytes": MIB + peak_bytes,
    }
    engine = an_engine(tmp_path, ("sized", sizes), ("sized", after))
    if is_right:
        assert Measured("reserved in between", 8 * MIB, "bytes") in budget.check(engine)
    else:
        with pytest.raises(CheckFailedError, match=f"{8 * MIB} bytes more were reserved"):
            budget.check(engine)


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
        "holdfast holdfast.workspace.plugin",
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
    machine = replace(MACHINE, devices=(H200,))
    errand = errands.Errand("growing", (), str(tmp_path), "", machine, 1.0)
    engine = replace(an_engine(tmp_path), errand=errand)
    with pytest.raises(CheckSkippedError, match="no engine was replaced"):
        recovery.memory_returned(engine)
    stopped: Any = Stopped()
    full = {"before": 1 << 30, "first engine": 5 << 30, "second engine": 5 << 30}
    assert recovery.memory_returned(replace(engine, server=stopped, readings=dict(full)))
    shared = replace(machine, devices=(replace(H200, is_integrated=True),))
    on_gb10 = replace(engine, errand=replace(errand, machine=shared), readings=dict(full))
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
