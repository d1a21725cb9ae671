"""The demo model's files, the shape of a step, the faults it meets and what is declared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.demo import ARCHITECTURE
from holdfast.demo.files import demo_directory, ensure_demo_model
from holdfast.demo.reserver import declare
from holdfast.demo.steps import StepQuantity, StepShape, commonest_count, quantity
from holdfast.demo.switches import DemoFault, DemoSwitches, scratch_need_bytes, scratch_rows
from holdfast.demo.tokenizer import IM_END_ID, IM_START_ID, VOCABULARY_SIZE
from holdfast.errors import UsageError
from holdfast.workspace.plan import MIB, Term
from holdfast.workspace.reservers import ReserverContext

FAULT = DemoFault("context", threshold=512, effect="scratch", scratch_bytes=MIB)


def _context(hf_config: Any, longest: int = 8192, batch: int = 2048) -> ReserverContext:
    return ReserverContext(None, longest, batch, max_num_seqs=1, hf_config=hf_config)


def _hf_config(switches: DemoSwitches) -> Any:
    return SimpleNamespace(architectures=[ARCHITECTURE], holdfast_demo=switches.to_record())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_demo_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def test_second_call_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    """A model that is there is not written again."""
    model = ensure_demo_model(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in model.iterdir()}
    assert ensure_demo_model(tmp_path) == model
    assert {path: path.stat().st_mtime_ns for path in model.iterdir()} == before


def test_weights_are_the_same_on_every_machine(model: Path, tmp_path: Path) -> None:
    """Two models made apart hold the same bytes."""
    again = ensure_demo_model(tmp_path)
    assert {path.name: path.read_bytes() for path in again.iterdir()} == {
        path.name: path.read_bytes() for path in model.iterdir()
    }


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_incomplete_model_is_made_again(tmp_path: Path, damage: str) -> None:
    """A file that is missing or cut short is noticed, and nothing else is left beside the model."""
    model = ensure_demo_model(tmp_path)
    whole = (model / "model.safetensors").read_bytes()
    if damage == "missing":
        (model / "model.safetensors").unlink()
    else:
        os.truncate(model / "model.safetensors", 100)
    assert ensure_demo_model(tmp_path) == model
    assert (model / "model.safetensors").read_bytes() == whole
    assert list(tmp_path.iterdir()) == [model]


def test_racing_processes_agree_on_one_whole_model(tmp_path: Path) -> None:
    """Processes that make the model at the same time all get it, whole."""
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        made = set(pool.map(ensure_demo_model, [tmp_path] * 4, timeout=60))
    assert list(tmp_path.iterdir()) == list(made)


def test_switches_name_the_directory(tmp_path: Path) -> None:
    """Models with different switches stand beside each other."""
    plain = ensure_demo_model(tmp_path)
    faulty = ensure_demo_model(tmp_path, DemoSwitches(faults=(FAULT,)))
    assert plain != faulty
    assert plain.parent == faulty.parent == tmp_path


def test_default_directory_is_in_the_user_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's cache directory is honoured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo_directory().is_relative_to(tmp_path)


def test_making_the_model_imports_neither_torch_nor_vllm(tmp_path: Path) -> None:
    """`--demo` costs no heavy import."""
    script = (
        "import sys, pathlib; from holdfast.demo.files import ensure_demo_model; "
        "ensure_demo_model(pathlib.Path(sys.argv[1])); "
        "sys.exit(int(bool({'torch', 'vllm', 'transformers'} & set(sys.modules))))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], check=False, timeout=60
    )
    assert finished.returncode == 0


@pytest.mark.parametrize("text", ["plain", "é 漢字 🙂", "\x00\x7f\r\n\t", "  two  spaces "])
def test_every_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    """Tokens are the bytes of the text, and decode to it."""
    tokens = tokenizer.encode(text, add_special_tokens=True)
    assert tokens == list(text.encode())
    assert tokenizer.decode(tokens) == text


def test_chat_template_marks_every_turn(tokenizer: Any) -> None:
    """A chat is ChatML with one special token at each end of a turn."""
    assert len(tokenizer) == VOCABULARY_SIZE
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n"
    )
    tokens = tokenizer.encode(text)
    assert (tokens.count(IM_START_ID), tokens.count(IM_END_ID)) == (3, 2)


def test_switches_survive_the_configuration(tmp_path: Path) -> None:
    """What config.json holds is parsed to the switches that were asked for."""
    switches = DemoSwitches(declares_need=False, scratch_bytes_per_token=512, faults=(FAULT,))
    config = json.loads((ensure_demo_model(tmp_path, switches) / "config.json").read_text())
    assert DemoSwitches.from_record(config["holdfast_demo"]) == switches


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ([], "object"),
        ({"declare_need": True}, "declare_need"),
        ({"declares_need": 1}, "declares_need"),
        ({"scratch_bytes_per_token": 1000}, "scratch_bytes_per_token"),
        ({"stages_decodes": 1}, "stages_decodes"),
        ({"faults": {}}, "faults"),
        ({"damage": "all of it"}, "damage"),
        ({"damage_start": -1}, "damage_start"),
        ({"faults": [{"when": "context"}]}, "threshold"),
        ({"faults": [{"when": "never", "threshold": 1, "effect": "nan"}]}, "when"),
        ({"faults": [{"when": "context", "threshold": 0, "effect": "nan"}]}, "threshold"),
        ({"faults": [{"when": "context", "threshold": 1, "effect": "boom"}]}, "effect"),
        ({"faults": [{"when": "context", "threshold": 1, "effect": "scratch"}]}, "scratch_bytes"),
    ],
)
def test_wrong_switch_is_named(record: object, named: str) -> None:
    """A switch that is unknown, missing or out of range is a usage error that names it."""
    with pytest.raises(UsageError, match=named):
        DemoSwitches.from_record(record)


def test_shape_of_a_mixed_step() -> None:
    """Prefills, decodes and cached contexts are told apart, and padding is left out."""
    step = StepShape.of([0, 1, 201, 217, 217], [900, 700, 16, 0])
    assert step == StepShape(
        scheduled_tokens=217,
        prefill_tokens=216,
        prefills=2,
        decodes=1,
        longest_context_tokens=900,
        longest_continued_tokens=500,
        first_request_tokens=1,
    )


@pytest.mark.parametrize(("new_tokens", "expected"), [(128, 0), (129, 871)])
def test_only_a_long_tail_continues(new_tokens: int, expected: int) -> None:
    """A tail of up to 128 tokens takes the short path, as in the kernels this imitates."""
    assert StepShape.of([0, new_tokens], [1000]).longest_continued_tokens == expected


def test_repetition_is_counted_despite_a_nonce() -> None:
    """The commonest token decides, so that prompts may begin with something unique."""
    assert commonest_count([5, 9, 9, 9, 7, 9]) == 4


PREFILL = StepShape.of([0, 300], [300])
CONTINUED = StepShape.of([0, 200], [600])
BATCH = StepShape.of([0, 150, 300], [150, 150])
DECODES = StepShape.of([0, 1, 2, 3], [50, 60, 70])
MIXED = StepShape.of([0, 1, 101], [50, 100])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("context", [300, 600, 150, 0, 100]),
        ("continuation", [0, 400, 0, 0, 0]),
        ("step_tokens", [300, 200, 300, 3, 101]),
        ("batched_tokens", [0, 0, 300, 0, 0]),
        ("decodes", [0, 0, 0, 3, 0]),
        ("mixed_tokens", [0, 0, 0, 0, 100]),
    ],
)
def test_each_quantity_singles_out_its_steps(name: StepQuantity, expected: list[int]) -> None:
    """A quantity is zero in steps of another kind."""
    steps = [PREFILL, CONTINUED, BATCH, DECODES, MIXED]
    assert [quantity(step, name) for step in steps] == expected


def test_fault_may_peak_at_one_size() -> None:
    """With `until` a fault strikes between two sizes only, so need is not monotone."""
    fault = DemoFault("step_tokens", 233, "scratch", scratch_bytes=MIB, until=233)
    due = [n for n in range(2, 300) if fault.is_due(StepShape.of([0, n], [n]), rank=0)]
    assert due == [233]


def test_fault_may_hit_one_rank() -> None:
    """The other ranks of the same step are spared."""
    fault = DemoFault("step_tokens", 1, "raise", rank=1)
    assert [fault.is_due(PREFILL, rank) for rank in (0, 1)] == [False, True]


@pytest.mark.parametrize(("longest", "batch"), [(8192, 2048), (513, 2048)])
def test_declared_need_is_what_the_largest_prefill_takes(longest: int, batch: int) -> None:
    """The declaration is the model's own arithmetic at the limits of the configuration."""
    context = _context(_hf_config(DemoSwitches(faults=(FAULT,))), longest, batch)
    expected = scratch_need_bytes(scratch_rows(longest, batch), 1024)
    assert list(declare(context)) == [Term("declared", "holdfast.demo: prefill scratch", expected)]
    assert expected == max(longest, batch) * 1024


@pytest.mark.parametrize(
    "config",
    [
        _hf_config(DemoSwitches(declares_need=False)),
        SimpleNamespace(architectures=["LlamaForCausalLM"]),
        SimpleNamespace(architectures=None),
    ],
)
def test_nothing_is_declared_for_others(config: Any) -> None:
    """A silent demo and a model of another architecture ask for nothing."""
    assert list(declare(_context(config))) == []
