"""Trained weights reach the served model: exported, found in the package, and in its wheel."""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from demo_training.checkpoints import recipe_sha256
from demo_training.course import FINE_TUNED_SHARE, Course
from demo_training.export import MAX_BYTES, export, read_network
from demo_training.shape import SHAPE
from demo_training.training import train
from holdfast.demo import weights
from holdfast.demo.files import MAX_MODEL_TOKENS, ensure_demo_model
from holdfast.demo.tokenizer import TOKENIZER_FILES, write_tokenizer
from holdfast.demo.trained import (
    FILES,
    RECORD,
    TRAINED_DIRECTORY,
    WEIGHTS_FILE,
    is_trained,
    trained_shape,
)
from holdfast.errors import UsageError

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "server" / "holdfast"
pytestmark = pytest.mark.usefixtures("one_thread")

COURSE = Course(
    seed=1,
    steps=1,
    lessons_per_step=4,
    fine_tuning_steps=1,
    long_text_steps=0,
    full_text_steps=0,
    hard_text_steps=0,
    record_steps=0,
)
LEAST_SCORE = 0.8
LEAST_OF_TOOL_CALLS = 0.7
"""To the letter, a function's name included; `docs/demo-model.md` says what they score."""
in_package = pytest.mark.skipif(
    not is_trained(), reason="the package has no trained weights: run make demo-weights"
)


def test_the_package_has_trained_weights() -> None:
    """Without them README's first answer is nonsense, and what needs them is skipped."""
    assert is_trained()


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of two steps, to its end."""
    directory = tmp_path_factory.mktemp("training")
    train(COURSE, directory)
    return directory


@pytest.fixture(scope="module")
def trained(training: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is exported of it."""
    target = tmp_path_factory.mktemp("package") / "trained_weights"
    export(training, target, questions=2)
    return target


def record_in(directory: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((directory / RECORD).read_text())
    return record


def hashes_of(directory: Path) -> dict[str, str]:
    return {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in FILES}


def test_the_record_says_how_the_weights_were_made(trained: Path) -> None:
    """With all that it takes to make them again and to check them, and with their licence."""
    record = record_in(trained)
    assert record["license"] == "Apache-2.0"
    assert record["course"] == asdict(COURSE)
    assert record["torch"] == torch.__version__
    assert record["files_sha256"] == hashes_of(trained)
    assert len(record["recipe_sha256"]) == 64
    assert trained_shape(trained) == SHAPE


def test_the_weights_are_a_mean_of_those_before_and_after_fine_tuning(
    training: Path, trained: Path, tmp_path: Path
) -> None:
    """A training without long texts ends with those after it, and keeps the others."""
    before = train(COURSE, tmp_path, stop_after=COURSE.steps).state_dict()
    after = train(COURSE, training).state_dict()
    exported = read_network(trained / WEIGHTS_FILE).state_dict()
    for name, weight in exported.items():
        mean = torch.lerp(before[name], after[name], FINE_TUNED_SHARE)
        torch.testing.assert_close(weight, mean, rtol=1e-3, atol=1e-4)
        assert not torch.equal(before[name], after[name])


def test_the_weights_are_small(trained: Path) -> None:
    """They are float16, and the package may carry all files together; every user may read them."""
    from safetensors.torch import load_file

    assert {one.dtype for one in load_file(trained / WEIGHTS_FILE).values()} == {torch.float16}
    assert (trained / WEIGHTS_FILE).stat().st_mode & 0o444 == 0o444
    assert sum(path.stat().st_size for path in trained.iterdir()) < MAX_BYTES


def test_a_training_is_exported_to_the_same_bytes_each_time(
    training: Path, trained: Path, tmp_path: Path
) -> None:
    """Also over files of another one."""
    for name in FILES:
        (tmp_path / name).write_text("another")
    export(training, tmp_path, questions=2)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        path.name: path.read_bytes() for path in trained.iterdir()
    }


@pytest.mark.parametrize("steps_done", [0, 1])
def test_an_unfinished_training_is_not_exported(tmp_path: Path, steps_done: int) -> None:
    """Its rate has not come down, so its weights are not the best that it has."""
    train(COURSE, tmp_path / "training", stop_after=steps_done)
    with pytest.raises(UsageError, match="no finished training"):
        export(tmp_path / "training", tmp_path / "package", questions=2)
    assert not (tmp_path / "package").exists()


def test_the_served_model_computes_what_was_trained(trained: Path, tmp_path: Path) -> None:
    """Its directory loads in transformers, and the logits are those of the trained network."""
    from transformers import AutoModelForCausalLM

    model = ensure_demo_model(tmp_path, trained_directory=trained)
    llama = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens = torch.arange(60).reshape(2, 30)
    with torch.no_grad():
        ours = read_network(trained / WEIGHTS_FILE)(tokens, torch.arange(30).repeat(2, 1))
        theirs = llama(tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert all((model / name).read_bytes() == (trained / name).read_bytes() for name in FILES)


def test_a_training_names_the_directory(trained: Path, tmp_path: Path) -> None:
    """Random weights and those of two trainings stand beside each other."""
    train(replace(COURSE, seed=2, steps=1), tmp_path / "training")
    export(tmp_path / "training", tmp_path / "other", questions=1)
    found = {
        ensure_demo_model(tmp_path / "models", trained_directory=one)
        for one in (trained, tmp_path / "other", tmp_path / "none")
    }
    assert len(found) == 3


def test_a_package_without_trained_weights_has_random_ones(tmp_path: Path) -> None:
    """They have the shape that is made for them, and the tokenizer of the trained ones."""
    model = ensure_demo_model(tmp_path, trained_directory=tmp_path / "none")
    config = json.loads((model / "config.json").read_text())
    assert config["hidden_size"] == weights.HIDDEN_SIZE != SHAPE.hidden_size
    write_tokenizer(tmp_path, MAX_MODEL_TOKENS)
    for name in TOKENIZER_FILES:
        assert (model / name).read_bytes() == (tmp_path / name).read_bytes()


def test_the_wheel_has_every_file_that_is_not_code() -> None:
    """Each is named under `package-data`, the trained weights included."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["holdfast"]
    known = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    files = {
        path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}
    }
    assert files <= known
    assert f"{TRAINED_DIRECTORY.relative_to(PACKAGE)}/*" in patterns


@in_package
def test_the_weights_of_the_package_are_those_of_its_record() -> None:
    """A file that was damaged or changed by hand is noticed."""
    assert record_in(TRAINED_DIRECTORY)["files_sha256"] == hashes_of(TRAINED_DIRECTORY)


@in_package
def test_the_weights_of_the_package_were_made_by_the_recipe_of_the_code() -> None:
    """A recipe that changes without new weights is noticed."""
    assert record_in(TRAINED_DIRECTORY)["recipe_sha256"] == recipe_sha256()


@in_package
def test_the_tokenizer_of_the_package_is_that_of_the_code(tmp_path: Path) -> None:
    """So the chats that are rendered are of the form that was taught."""
    write_tokenizer(tmp_path, MAX_MODEL_TOKENS)
    for name in TOKENIZER_FILES:
        packaged = json.loads((TRAINED_DIRECTORY / name).read_text())
        assert packaged == json.loads((tmp_path / name).read_text())


@in_package
def test_the_weights_of_the_package_know_their_lessons() -> None:
    """Each skill answers most questions to the letter, in phrasings that no lesson used."""
    scores: dict[str, float] = record_in(TRAINED_DIRECTORY)["scores"]
    assert scores.pop("tool call") >= LEAST_OF_TOOL_CALLS
    assert {name: score for name, score in scores.items() if score < LEAST_SCORE} == {}
