"""Messages between nodes are read as they were written, and only by whom they are for."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.labels import NODE_REFUSAL_REASONS
from holdfast.nodes.frames import MAX_FRAME_BYTES, MAX_OPENING_BYTES
from holdfast.nodes.messages import (
    Challenge,
    End,
    Ended,
    Goodbye,
    HeartbeatAnswer,
    Hello,
    Join,
    KeyProof,
    Lost,
    NodeHeartbeat,
    NodeMessage,
    Opening,
    RankUpdate,
    Refused,
    Rejected,
    Start,
    Terms,
    Welcome,
    decoded,
    decoded_opening,
    encoded,
)
from holdfast.records import Death
from holdfast.settings.flag import is_node_name
from node_pairs import FACTS, SPEC
from sample_status import a_rank

HEX = "ab" * 32
START = Start(1, 1, 2, "10.0.0.1", 29500, ("--x",), "f", SPEC)
JOIN = Join("spark-2", HEX, FACTS)
MESSAGES: list[NodeMessage] = [
    Terms("m", FACTS),
    JOIN,
    Welcome(),
    Refused("different", "a line", is_final=True),
    NodeHeartbeat(1),
    HeartbeatAnswer(1),
    START,
    End(1, "why"),
    Lost(1, Death("worker_exit", "why")),
    Ended(1),
    RankUpdate(1, 5.0, (a_rank(rank=1),), is_compiling=True),
    Goodbye("why"),
]
OPENINGS: list[Opening] = [Hello(1, HEX), Challenge(1, HEX), KeyProof(HEX), Rejected("wrong_key")]


def test_every_kind_of_message_is_here() -> None:
    """So that none is left out of the tests below."""
    assert {type(message) for message in MESSAGES} == set(get_args(NodeMessage))
    assert {type(message) for message in OPENINGS} == set(get_args(Opening))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: type(one).__name__)
def test_a_message_is_read_as_it_was_written(message: NodeMessage) -> None:
    """By a peer that has proven the key, and by nobody before."""
    assert decoded(encoded(message)) == message
    with pytest.raises(ValueError, match="kind"):
        decoded_opening(encoded(message))


@pytest.mark.parametrize("message", OPENINGS, ids=lambda one: type(one).__name__)
def test_an_opening_is_read_as_it_was_written(message: Opening) -> None:
    """Before the proof, within its limit, and not after it."""
    payload = encoded(message)
    assert decoded_opening(payload) == message
    assert len(payload) <= MAX_OPENING_BYTES
    with pytest.raises(ValueError, match="kind"):
        decoded(payload)


def test_every_reason_of_a_rejection_fits_its_limit() -> None:
    """The peer has proven nothing, so it reads little."""
    assert all(len(encoded(Rejected(one))) <= MAX_OPENING_BYTES for one in NODE_REFUSAL_REASONS)


def test_the_statistics_of_eight_full_ranks_fit_in_a_frame() -> None:
    """With the longest errors and callers that a rank reports."""
    rank = a_rank(
        rank=1, fatal_error="e" * 2000, callers={"c" * 110 + str(i): 1 for i in range(16)}
    )
    assert len(encoded(RankUpdate(1, 5.0, (rank,) * 8, is_compiling=False))) < MAX_FRAME_BYTES


@pytest.mark.parametrize(
    "payload",
    [
        b"[]",
        b"1",
        b"{}",
        b'{"kind":1}',
        b'{"kind":["end"]}',
        b'{"kind":"nothing"}',
        b'{"kind":"End","generation":1,"reason":""}',
        b'{"kind":"end","generation":1}',
        b'{"kind":"end","generation":1,"reason":"","more":1}',
        b'{"kind":"welcome","more":1}',
    ],
)
def test_what_is_not_a_message_is_refused(payload: bytes) -> None:
    """Whatever it is."""
    with pytest.raises(ValueError, match=r"kind|object|fields"):
        decoded(payload)


@pytest.mark.parametrize(
    "changes",
    [
        {"generation": 0},
        {"node_rank": 0},
        {"node_rank": 2},
        {"master_port": 0},
        {"master_port": 65536},
        {"master_address": ""},
    ],
)
def test_a_generation_that_cannot_be_started_is_refused(changes: dict[str, Any]) -> None:
    """It does not get as far as vLLM."""
    payload = json.loads(encoded(START)) | changes
    with pytest.raises(ValueError, match="generation"):
        decoded(json.dumps(payload).encode())


@pytest.mark.parametrize("name", ["", "a b", "a" * 65, "ä", 'a"', "a\n"])
def test_a_name_that_no_metric_can_carry_is_refused(name: str) -> None:
    """It would be a label."""
    assert not is_node_name(name)
    with pytest.raises(ValueError, match="name"):
        replace(JOIN, name=name)


@pytest.mark.parametrize("text", ["", "ab", "AB" * 32, "zz" * 32, "ab" * 33, "ab" * 32 + "\n"])
def test_a_nonce_is_of_one_form(text: str) -> None:
    """There is one way to write it."""
    for kind in (Hello, Challenge):
        with pytest.raises(ValueError, match="hexadecimal"):
            kind(1, text)
    with pytest.raises(ValueError, match="hexadecimal"):
        KeyProof(text)


@given(payload=st.binary(max_size=200))
def test_random_bytes_are_a_value_error(payload: bytes) -> None:
    """For either reader."""
    for reader in (decoded, decoded_opening):
        with pytest.raises(ValueError, match=r"."):
            reader(payload)
