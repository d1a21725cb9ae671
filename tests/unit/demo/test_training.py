"""The network that is trained is the one that is served, and a training can be repeated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from demo_training import shape
from demo_training.batches import batch_of, step_batches
from demo_training.chats import example_of
from demo_training.exam import passed
from demo_training.lessons import ask
from demo_training.network import Network
from demo_training.training import Course, train
from holdfast.demo.switches import DEFAULT_SWITCHES
from holdfast.demo.tokenizer import VOCABULARY_SIZE

COURSE = Course(seed=1, steps=3, lessons_per_step=4)


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
        hidden_size=shape.HIDDEN_SIZE,
        intermediate_size=shape.INTERMEDIATE_SIZE,
        num_hidden_layers=shape.LAYERS,
        num_attention_heads=shape.HEADS,
        num_key_value_heads=shape.KV_HEADS,
        head_dim=shape.HEAD_SIZE,
        rms_norm_eps=shape.NORM_EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": shape.ROTARY_BASE},
        tie_word_embeddings=False,
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


def test_a_step_has_the_same_batches_each_time() -> None:
    """Seed and step decide what is taught."""
    first, again, other = (step_batches(1, step, lessons=8) for step in (5, 5, 6))
    assert all(map(torch.equal, [b.tokens for b in first], [b.tokens for b in again]))
    assert [b.tokens.tolist() for b in first] != [b.tokens.tolist() for b in other]


def test_a_training_that_was_interrupted_ends_with_the_same_weights(tmp_path: Path) -> None:
    """Three steps in one go, and one step and then two."""
    whole = weights_of(train(COURSE, tmp_path / "whole"))
    train(COURSE, tmp_path / "parts", stop_after=1)
    resumed = weights_of(train(COURSE, tmp_path / "parts"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_untrained_weights_pass_no_question(network: Network) -> None:
    """The exam does not give away what it asks for."""
    assert not any(passed(network, "capital", questions=20))


def test_the_network_suits_the_demo_model() -> None:
    """Its weights take less than 10 MB as float16, and a query fits into a row of the scratch."""
    assert sum(parameter.numel() for parameter in Network().parameters()) * 2 < 10_000_000
    query_bytes = 4 * shape.HEADS * shape.HEAD_SIZE
    assert query_bytes <= DEFAULT_SWITCHES.scratch_bytes_per_token
