"""The network that is trained is the one that is served, and a training can be repeated."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch

from demo_training import shape
from demo_training.batches import batch_of, step_batches
from demo_training.chats import example_of, example_of_dialogue
from demo_training.checkpoints import Checkpoint, read_checkpoint, write_checkpoint
from demo_training.course import FINE_TUNING_RATE, Course, drill_share
from demo_training.drills import draw_drill
from demo_training.exam import passed
from demo_training.export import export, read_network
from demo_training.lessons import Lesson, Turn, ask
from demo_training.network import Network
from demo_training.training import optimizers_of, train
from holdfast.demo.files import MAX_MODEL_TOKENS, NORM_EPSILON, ROTARY_BASE
from holdfast.demo.switches import DEFAULT_SWITCHES
from holdfast.demo.tokenizer import BOS_ID, EOS_ID, IM_END_ID, VOCABULARY_SIZE
from holdfast.demo.trained import WEIGHTS_FILE
from holdfast.errors import UsageError

pytestmark = pytest.mark.usefixtures("one_thread")

COURSE = Course(
    seed=1,
    steps=2,
    lessons_per_step=4,
    fine_tuning_steps=1,
    long_text_steps=1,
    full_text_steps=0,
    hard_text_steps=0,
    record_steps=0,
    long_texts_per_step=1,
)
LONG = Course(steps=3000)
LONG_TEXTS = (LONG.fine_tuned_steps, LONG.total_steps)


@pytest.fixture(scope="module")
def network() -> Network:
    torch.manual_seed(1)
    return Network()


def weights_of(network: Network) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in network.state_dict().items()}


def test_logits_are_those_of_transformers(network: Network) -> None:
    """The state dict is a checkpoint of its Llama, and gives the same logits there."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        rms_norm_eps=NORM_EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": ROTARY_BASE},
        tie_word_embeddings=False,
        **asdict(shape.SHAPE),
    )
    llama = LlamaForCausalLM(settings)
    llama.load_state_dict(network.state_dict())
    tokens = torch.arange(60).reshape(2, 30)
    positions = torch.arange(30).repeat(2, 1)
    with torch.no_grad():
        ours = network(tokens, positions)
        theirs = llama(tokens, position_ids=positions).logits
        wanted = positions > 20
        picked = network(tokens, positions, wanted)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(picked, ours[wanted])


def test_a_batch_teaches_the_reply_and_nothing_else() -> None:
    """Labels are the tokens of the reply, each at the place before it."""
    example = example_of(ask("Hello", "Hi"))
    batch = batch_of([example, example_of(ask("Hello again", "Hi"))])
    taught = batch.labels[0][batch.labels[0] >= 0].tolist()
    assert tuple(taught) == example.tokens[example.first_taught :]
    assert batch.labels[0, example.first_taught - 1] == ord("H")


def test_every_reply_of_a_dialogue_is_taught() -> None:
    """And no question: what stands between the replies is only read."""
    turns = (Turn("user", "One?"), Turn("assistant", "Ja"), Turn("user", "Two?"))
    example = example_of_dialogue(Lesson(turns, "Nein"))
    (labels,) = batch_of([example]).labels
    taught = [token for token in labels.tolist() if token >= 0]
    assert taught == [*b"Ja", IM_END_ID, *b"Nein", IM_END_ID]
    assert example.tokens == example_of(Lesson(turns, "Nein")).tokens


def test_a_gap_tears_no_word_apart() -> None:
    """Positions jump at most once, behind a sentence or a line of the prompt, and stay in range."""
    random = Random(1)
    example = example_of(ask("The key of Anna is 12345. What is the key of Anna?", "12345"))
    jumps = set()
    for _ in range(100):
        (positions,) = batch_of([example], random).positions.tolist()
        assert positions[-1] < MAX_MODEL_TOKENS
        found = [at for at in range(1, len(positions)) if positions[at] > positions[at - 1] + 1]
        assert len(found) <= 1
        jumps |= set(found)
    assert len(jumps) > 1
    assert max(jumps) <= example.first_taught
    assert {example.tokens[at - 1] for at in jumps} <= set(b".\n")


def test_a_drill_teaches_what_its_prompt_has_said() -> None:
    """Each taught word appears in the prompt, so the only way to predict it is to copy it."""
    random = Random(1)
    for _ in range(200):
        drill = draw_drill(random)
        said, taught = drill.tokens[: drill.first_taught], drill.tokens[drill.first_taught :]
        words = bytes(taught[:-1]).decode().split(", ")
        assert all(word in bytes(said).decode() for word in words)
        assert taught[-1] == EOS_ID


def test_a_course_begins_with_drills() -> None:
    """Lessons that need a copy come after the steps that teach to copy."""
    assert drill_share(0) == 1.0
    assert 0 < drill_share(Course().steps - 1) < 1 / 2


def test_the_rate_rises_and_falls_once_more_for_each_later_part() -> None:
    """What comes after the lessons begins and ends gently, below the peak of the lessons."""
    rates = iter([LONG.rate(step) for step in range(LONG.total_steps)])
    lengths = (LONG.steps, LONG.fine_tuning_steps, LONG.long_text_steps, LONG.full_text_steps)
    last_lengths = (LONG.hard_text_steps, LONG.record_steps)
    lessons, *later = ([*islice(rates, length)] for length in (*lengths, *last_lengths))
    assert not [*rates]
    assert max(lessons) == 1.0
    for part in later:
        assert max(part) == FINE_TUNING_RATE < 1
    for part in (lessons, *later):
        assert max(part[0], part[-1]) < max(part) / 10


def test_long_texts_grow_to_the_length_of_the_context() -> None:
    """The second half of their steps has texts that nearly fill it, and so has what follows."""
    tokens = [LONG.longest_text_tokens(step) for step in range(*LONG_TEXTS)]
    assert tokens == sorted(tokens)
    assert tokens[0] < MAX_MODEL_TOKENS / 2
    assert min(tokens[LONG.long_text_steps // 2 :]) > 0.97 * MAX_MODEL_TOKENS
    course = replace(COURSE, full_text_steps=1)
    lessons, growing, full = (
        max(batch.tokens.shape[1] for batch in step_batches(course, step)) for step in (2, 3, 4)
    )
    assert lessons < 2000 < growing < 3200
    assert 0.8 * MAX_MODEL_TOKENS < full < MAX_MODEL_TOKENS


def text_of(step: int) -> str:
    """Return what all batches of a step say."""
    rows = (row for batch in step_batches(LONG, step) for row in batch.tokens.tolist())
    return "\n".join(bytes(one for one in row if one < BOS_ID).decode() for row in rows)


def test_the_last_lessons_have_answers_to_record() -> None:
    """Half as many long texts stand beside them."""
    first = LONG.hard_text_trained_steps
    assert [LONG.long_texts(step) for step in (first - 1, first)] == [4, 2]
    assert "_answer(answer: string)" not in text_of(first - 1)
    assert "_answer(answer: string)" in text_of(first)


def test_fine_tuning_has_lessons_of_its_own() -> None:
    """The step after the last one of the course draws from other shares."""
    first, other = (step_batches(replace(LONG, steps=steps), 500) for steps in (501, 500))
    assert [b.tokens.tolist() for b in first] != [b.tokens.tolist() for b in other]


def test_a_step_has_the_same_batches_each_time() -> None:
    """Course and step decide what is taught."""
    first, again, other = (step_batches(COURSE, step) for step in (1, 1, 0))
    assert all(map(torch.equal, [b.tokens for b in first], [b.tokens for b in again]))
    assert [b.tokens.tolist() for b in first] != [b.tokens.tolist() for b in other]


def test_a_training_that_was_interrupted_ends_with_the_same_weights(tmp_path: Path) -> None:
    """Four steps in one go, and one step and then three."""
    whole = weights_of(train(COURSE, tmp_path / "whole"))
    train(COURSE, tmp_path / "parts", stop_after=1)
    resumed = weights_of(train(COURSE, tmp_path / "parts"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def begun_from_a_package(course: Course, shorter: Course, directory: Path) -> Path:
    """Return the directory of a training of `course` that has only the weights of `shorter`."""
    train(shorter, directory / "shorter")
    export(directory / "shorter", directory / "package", questions=1)
    network = read_network(directory / "package" / WEIGHTS_FILE)
    weights, states = network.state_dict(), [one.state_dict() for one in optimizers_of(network)]
    (directory / "parts").mkdir()
    begun = Checkpoint(course, shorter.total_steps, weights, states, weights)
    write_checkpoint(directory / "parts", begun)
    return directory / "parts"


def test_long_texts_go_on_from_the_weights_of_a_package(tmp_path: Path) -> None:
    """Those of the same course without long texts are enough; its other state is not needed."""
    shorter = replace(COURSE, long_text_steps=0)
    whole = train(COURSE, tmp_path / "whole")
    resumed = train(COURSE, begun_from_a_package(COURSE, shorter, tmp_path))
    assert all(map(torch.equal, weights_of(whole).values(), weights_of(resumed).values()))


def test_records_go_on_from_the_weights_of_a_package(tmp_path: Path) -> None:
    """Those of the same course without them, which ends with hard texts."""
    shorter = replace(COURSE, hard_text_steps=1)
    course = replace(shorter, record_steps=1)
    whole = train(course, tmp_path / "whole")
    resumed = train(course, begun_from_a_package(course, shorter, tmp_path))
    assert all(map(torch.equal, weights_of(whole).values(), weights_of(resumed).values()))


@pytest.mark.parametrize(
    ("longer", "steps_done", "continues"),
    [
        (replace(LONG, steps=6000), 1500, True),
        (replace(LONG, steps=6000), 2500, False),
        (LONG, 3000, True),
        (LONG, 3500, True),
        (replace(LONG, long_text_steps=900), 3900, True),
        (replace(LONG, long_text_steps=900), 3910, False),
        (replace(LONG, long_texts_per_step=8), 3910, False),
        (replace(LONG, hard_text_steps=900), 4600, True),
        (replace(LONG, hard_text_steps=900), 4900, False),
        (replace(LONG, seed=1), 100, False),
        (replace(LONG, lessons_per_step=32), 100, False),
        (replace(LONG, steps=1000), 2000, False),
    ],
)
def test_a_course_goes_on_where_its_own_steps_were_done(
    longer: Course, steps_done: int, *, continues: bool
) -> None:
    """With the same lessons, and at the same rates: before the decay of a shorter course."""
    assert longer.continues(LONG, steps_done) is continues


def test_a_checkpoint_of_another_course_is_refused(tmp_path: Path) -> None:
    """It stays as it is."""
    train(COURSE, tmp_path, stop_after=1)
    with pytest.raises(UsageError, match="another course"):
        train(replace(COURSE, seed=2), tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint is not None
    assert (checkpoint.course, checkpoint.steps_done) == (COURSE, 1)


def test_a_checkpoint_of_other_code_is_refused(tmp_path: Path) -> None:
    """Nobody could make its weights again."""
    write_checkpoint(tmp_path, Checkpoint(COURSE, 1, {}, []))
    path = tmp_path / "checkpoint.pt"
    torch.save(torch.load(path) | {"recipe": "another"}, path)
    with pytest.raises(UsageError, match="other code"):
        read_checkpoint(tmp_path)


def test_untrained_weights_pass_no_question(network: Network) -> None:
    """The exam does not give away what it asks for."""
    assert not any(passed(network, "capital", questions=20))


def test_the_network_suits_the_demo_model() -> None:
    """Its weights take less than 10 MB as float16, and a query fits into a row of the scratch."""
    assert sum(parameter.numel() for parameter in Network().parameters()) * 2 < 10_000_000
    query_bytes = 4 * shape.HEADS * shape.HEAD_SIZE
    assert query_bytes <= DEFAULT_SWITCHES.scratch_bytes_per_token
