"""Reservers of other packages, and models that reserve for themselves."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from vllm.v1.worker import workspace

from holdfast.errors import HoldfastError
from holdfast.workspace import reservers
from holdfast.workspace.manager import WorkspaceManager
from holdfast.workspace.plan import MIB, Term
from holdfast.workspace.reservers import ReserverContext, declared_terms, reserve_workspace

VLLMS_MANAGER = WorkspaceManager.__bases__[0]
CPU = torch.device("cpu")
CONTEXT = ReserverContext(
    vllm_config=None,
    max_model_len=4096,
    max_num_batched_tokens=2048,
    max_num_seqs=8,
    hf_config=None,
)
GOOD = """
from holdfast.workspace.plan import Term

def declare(context):
    yield Term("declared", "good", context.max_model_len)
"""
Installer = Callable[..., None]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installer:
    """Installs packages with reservers where `importlib.metadata` finds them."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(**modules: str) -> None:
        for name, source in modules.items():
            monkeypatch.delitem(sys.modules, f"reserver_{name}", raising=False)
            (tmp_path / f"reserver_{name}.py").write_text(source)
        lines = [f"{name} = reserver_{name}:declare" for name in modules]
        metadata = tmp_path / "reservers_of_test-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: reservers-of-test\n")
        (metadata / "entry_points.txt").write_text("\n".join([f"[{reservers.GROUP}]", *lines, ""]))

    return install


@pytest.fixture(autouse=True)
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkspaceManager]:
    """Holdfast's manager, created as vLLM does, with two lanes."""
    monkeypatch.setattr(workspace, "WorkspaceManager", WorkspaceManager)
    workspace.init_workspace_manager(CPU, 1, 2)
    current = workspace.current_workspace_manager()
    assert isinstance(current, WorkspaceManager)
    yield current
    workspace.reset_workspace_manager()


def by_test(terms: Iterable[Term]) -> list[Term]:
    """Remove what an installed Holdfast declares for its demo."""
    return [term for term in terms if not term.asked_by.startswith("holdfast.demo")]


def test_installed_reservers_are_asked(installed: Installer) -> None:
    """Every entry point of the group is called with the context, in the order of names."""
    second = GOOD.replace('"good"', '"also good"')
    installed(b_second=second, a_first=GOOD)
    terms = by_test(declared_terms(CONTEXT))
    assert terms == [Term("declared", "good", 4096), Term("declared", "also good", 4096)]


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        ("raise OSError('at import')", "OSError: at import"),
        ("import a_module_that_is_not_there", "ModuleNotFoundError"),
        ("def another(context): return ()", "has no attribute 'declare'"),
        (
            "class OwnError(Exception): pass\ndef declare(context): raise OwnError('own')",
            "OwnError: own",
        ),
        ("def declare(context): return None", "'NoneType' object is not iterable"),
        ("def declare(context): return [5]", "a reserver must yield terms, not 5"),
        (GOOD.replace('"declared"', '"learned"'), "not 'learned'"),
        (GOOD.replace("context.max_model_len", "-1"), "not -1"),
        (GOOD.replace("context.max_model_len", "1.5"), "not 1.5"),
        (GOOD.replace("context.max_model_len", "True"), "not True"),
        (GOOD.replace('"good"', '""'), "a term must name what asks for it"),
        (GOOD.replace('"good"', "None"), "a term must name what asks for it"),
        (
            GOOD.replace("max_model_len)", "max_model_len, ())"),
            "whole numbers of 0 or more, not ()",
        ),
        (GOOD.replace("max_model_len)", "max_model_len, (-1,))"), "not (-1,)"),
        (GOOD + "    raise ValueError('after a term')\n", "after a term"),
    ],
)
def test_a_bad_reserver_is_left_out(
    bad: str, cause: str, installed: Installer, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it raises or returns stops no other reserver, and the log names it and the cause."""
    installed(bad=bad, good=GOOD)
    with caplog.at_level(logging.WARNING):
        terms = by_test(declared_terms(CONTEXT))
    assert terms == [Term("declared", "good", 4096)]
    assert "Reserver bad (reserver_bad:declare) is left out" in caplog.text
    assert cause in caplog.text


def test_the_demo_is_a_reserver() -> None:
    """Holdfast's own demo declares its needs like any other package."""
    assert "holdfast_demo" in {point.name for point in entry_points(group=reservers.GROUP)}


def test_a_model_reserves_in_every_slot(manager: WorkspaceManager) -> None:
    """The bytes are reserved at once in every lane, and the plan names the caller."""
    reserve_workspace(((MIB,), torch.int32), ((1,), torch.uint8))
    assert list(manager.slot_sizes().values()) == [6 * MIB, 6 * MIB]
    (term,) = by_test(declared_terms(CONTEXT))
    assert term.source == "declared"
    assert term.needed_bytes == 4 * MIB + 256
    assert term.asked_by.startswith("test_reservers.py:")
    assert term.asked_by.endswith(":test_a_model_reserves_in_every_slot")


def test_a_model_that_knows_its_lane_reserves_there_alone(manager: WorkspaceManager) -> None:
    """A line that serves a target and its draft is a term of each."""
    for lane, size_bytes in ((0, 4 * MIB), (1, 2 * MIB)):
        reserve_workspace(((size_bytes,), torch.uint8), lanes=(lane,))
    assert list(manager.slot_sizes().values()) == [4 * MIB, 2 * MIB]
    terms = by_test(declared_terms(CONTEXT))
    assert [(term.needed_bytes, term.lanes) for term in terms] == [
        (4 * MIB, (0,)),
        (2 * MIB, (1,)),
    ]


def test_many_layers_declare_once(manager: WorkspaceManager) -> None:
    """A line that reserves for each layer of a model is one term, of the largest need."""
    for rows in (10, 30, 20):
        reserve_workspace(((rows, 256), torch.uint8))
    assert [term.needed_bytes for term in by_test(declared_terms(CONTEXT))] == [30 * 256]
    assert manager.accounting.reserved_bytes == [2 * MIB, 2 * MIB]


def test_a_model_that_reserves_after_the_lock_is_told(manager: WorkspaceManager) -> None:
    """What fits is accepted; what does not fit is an error with a remedy."""
    manager.bind(None, "alongside")
    reserve_workspace(((MIB,), torch.uint8))
    manager.lock()
    reserve_workspace(((MIB,), torch.uint8))
    with pytest.raises(HoldfastError, match="too late"):
        reserve_workspace(((3 * MIB,), torch.uint8))


def test_without_a_manager_a_model_is_told() -> None:
    """Reserving outside a worker is an error that names the caller."""
    workspace.reset_workspace_manager()
    with pytest.raises(HoldfastError, match=r"test_reservers\.py:\d+:test_without_a_manager"):
        reserve_workspace(((MIB,), torch.uint8))
    assert by_test(declared_terms(CONTEXT)) == []


def test_under_vllms_own_manager_a_model_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that reserves through Holdfast also runs without it."""
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(workspace, "WorkspaceManager", VLLMS_MANAGER)
    workspace.init_workspace_manager(CPU)
    reserve_workspace(((MIB,), torch.uint8))
    assert workspace.current_workspace_manager()._current_workspaces[0].numel() == MIB
    assert by_test(declared_terms(CONTEXT)) == []
