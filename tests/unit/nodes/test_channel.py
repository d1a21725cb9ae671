"""One connection, without a socket: the proof of the key, and what ends it."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.nodes import messages
from holdfast.nodes.channel import HANDSHAKE_SECONDS, SILENCE_SECONDS, Channel
from holdfast.nodes.frames import LENGTH_BYTES, MAX_FRAME_BYTES, MAX_OPENING_BYTES, framed
from holdfast.nodes.messages import (
    PROTOCOL,
    Challenge,
    Goodbye,
    Hello,
    KeyProof,
    NodeMessage,
    Rejected,
    encoded,
)
from node_pairs import KEY, a_nonce

OTHER_KEY = b"another-key-another-key-another-key"


def a_channel(role: str, key: bytes = KEY, now: float = 0.0) -> Channel:
    return Channel("head" if role == "head" else "follower", key, a_nonce(), now)


@dataclass
class Pair:
    """Two ends, and everything that each of them wrote."""

    head: Channel
    follower: Channel
    of_head: bytes = b""
    of_follower: bytes = b""

    def exchange(self, now: float = 0.0) -> tuple[list[NodeMessage], list[NodeMessage]]:
        """Carry bytes until there are none; what the head and the follower received."""
        at_head: list[NodeMessage] = []
        at_follower: list[NodeMessage] = []
        while True:
            up, down = self.follower.outgoing(), self.head.outgoing()
            self.of_follower += up
            self.of_head += down
            if not up and not down:
                return at_head, at_follower
            if up:
                at_head += self.head.received(up, now)
            if down:
                at_follower += self.follower.received(down, now)


def a_pair(head_key: bytes = KEY, follower_key: bytes = KEY) -> Pair:
    return Pair(a_channel("head", head_key), a_channel("follower", follower_key))


def an_open_pair() -> Pair:
    pair = a_pair()
    pair.exchange()
    assert pair.head.is_open
    assert pair.follower.is_open
    return pair


def reason(channel: Channel) -> str:
    return "" if channel.failure is None else channel.failure.reason


def test_both_ends_open_with_the_same_key() -> None:
    """And then carry messages both ways."""
    pair = an_open_pair()
    pair.head.send(Goodbye("down"))
    pair.follower.send(Goodbye("up"))
    assert pair.exchange() == ([Goodbye("up")], [Goodbye("down")])


def test_the_key_is_not_on_the_wire() -> None:
    """In no form that its bytes have."""
    pair = an_open_pair()
    wire = pair.of_head + pair.of_follower
    assert KEY not in wire
    assert KEY.hex().encode() not in wire


def test_another_key_is_refused_on_both_sides() -> None:
    """The follower hears why; the head has proven nothing to it."""
    pair = a_pair(follower_key=OTHER_KEY)
    pair.exchange()
    assert (reason(pair.head), reason(pair.follower)) == ("wrong_key", "wrong_key")
    assert b'"proof"' not in pair.of_head


def test_a_head_without_the_key_is_refused() -> None:
    """Whatever it answers: an attacker may accept every follower."""
    follower = a_channel("follower")
    follower.outgoing()
    follower.received(framed(encoded(Challenge(PROTOCOL, "ab" * 32))), 0)
    follower.received(framed(encoded(KeyProof("00" * 32))), 0)
    assert reason(follower) == "wrong_key"


def test_the_head_speaks_the_protocol_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version is refused on both sides, with the version in the line."""
    head = a_channel("head")
    monkeypatch.setattr("holdfast.nodes.channel.PROTOCOL", PROTOCOL + 1)
    pair = Pair(head, a_channel("follower"))
    monkeypatch.undo()
    assert json.loads(pair.follower.outgoing()[LENGTH_BYTES:])["protocol"] == PROTOCOL + 1
    pair.head.received(framed(encoded(Hello(PROTOCOL + 1, "ab" * 32))), 0)
    assert pair.head.failure is not None
    assert f"version {PROTOCOL + 1}" in pair.head.failure.line
    pair.exchange()
    assert (reason(pair.head), reason(pair.follower)) == ("wrong_protocol", "wrong_protocol")


def test_a_proof_sent_back_opens_nothing() -> None:
    """A peer that reflects everything never has what is expected of it."""
    follower = a_channel("follower")
    follower.outgoing()
    follower.received(framed(encoded(Challenge(PROTOCOL, "ab" * 32))), 0)
    own_proof = follower.outgoing()
    follower.received(own_proof, 0)
    assert (follower.is_open, reason(follower)) == (False, "wrong_key")


def test_a_hello_sent_back_is_out_of_turn() -> None:
    """The kinds of the two sides differ."""
    follower = a_channel("follower")
    follower.received(follower.outgoing(), 0)
    assert reason(follower) == "malformed"


def test_a_recorded_handshake_opens_nothing_later() -> None:
    """The head has a new nonce for each connection."""
    recorded = an_open_pair().of_follower
    head = a_channel("head")
    head.received(recorded, 0)
    assert (head.is_open, reason(head)) == (False, "wrong_key")


def test_a_frame_of_another_connection_is_forged() -> None:
    """Each connection has keys of its own."""
    one, other = an_open_pair(), an_open_pair()
    other.follower.send(Goodbye("other"))
    assert one.head.received(other.follower.outgoing(), 0) == []
    assert reason(one.head) == "forged"


def test_a_frame_sent_back_is_forged() -> None:
    """Each direction has a key of its own."""
    pair = an_open_pair()
    pair.head.send(Goodbye("down"))
    pair.head.received(pair.head.outgoing(), 0)
    assert reason(pair.head) == "forged"


def test_a_repeated_frame_is_forged() -> None:
    """What was received before stays received."""
    pair = an_open_pair()
    pair.follower.send(Goodbye("up"))
    frame = pair.follower.outgoing()
    assert pair.head.received(frame + frame, 0) == [Goodbye("up")]
    assert reason(pair.head) == "forged"


def test_a_message_before_the_proof_is_refused() -> None:
    """It is not even read."""
    head = a_channel("head")
    assert head.received(framed(encoded(Goodbye("up"))), 0) == []
    assert reason(head) == "malformed"


def test_a_proof_without_a_hello_is_out_of_turn() -> None:
    """There is no nonce that it could prove anything about."""
    head = a_channel("head")
    head.received(framed(encoded(KeyProof("00" * 32))), 0)
    assert reason(head) == "malformed"


def test_a_second_hello_is_out_of_turn() -> None:
    """Nobody gets two challenges on one connection."""
    head = a_channel("head")
    for _ in range(2):
        head.received(framed(encoded(Hello(PROTOCOL, "ab" * 32))), 0)
    assert reason(head) == "malformed"


def test_only_the_head_rejects() -> None:
    """A stranger cannot make it believe anything."""
    head = a_channel("head")
    head.received(framed(encoded(Rejected("wrong_key"))), 0)
    assert reason(head) == "malformed"


def test_a_stranger_may_send_little() -> None:
    """And a peer much more, with a limit as well."""
    head = a_channel("head")
    head.received((MAX_OPENING_BYTES + 1).to_bytes(LENGTH_BYTES, "big"), 0)
    assert reason(head) == "oversized"
    pair = an_open_pair()
    pair.head.received((MAX_FRAME_BYTES + 1).to_bytes(LENGTH_BYTES, "big"), 0)
    assert reason(pair.head) == "oversized"


@pytest.mark.parametrize("role", ["head", "follower"])
def test_a_silent_stranger_is_too_slow(role: str) -> None:
    """On either side."""
    channel = a_channel(role)
    channel.tick(HANDSHAKE_SECONDS)
    assert reason(channel) == ""
    channel.tick(HANDSHAKE_SECONDS + 0.1)
    assert reason(channel) == "too_slow"


def test_a_stranger_that_sends_byte_by_byte_is_too_slow() -> None:
    """The time is for the whole handshake."""
    head, now = a_channel("head"), 0.0
    for byte in framed(encoded(Hello(PROTOCOL, "ab" * 32))):
        now += 1
        head.received(bytes([byte]), now)
    assert reason(head) == "too_slow"


def test_heartbeats_keep_a_silent_channel_open() -> None:
    """Without a message of anybody."""
    pair = an_open_pair()
    for quarter in range(100):
        now = quarter / 4
        pair.head.tick(now)
        pair.follower.tick(now)
        assert pair.exchange(now) == ([], [])
    assert pair.head.is_open
    assert pair.follower.is_open


@pytest.mark.parametrize("role", ["head", "follower"])
def test_silence_ends_a_channel(role: str) -> None:
    """The heartbeat of the other is not answered in time."""
    pair = an_open_pair()
    channel = pair.head if role == "head" else pair.follower
    for quarter in range(int(4 * SILENCE_SECONDS) + 1):
        channel.tick(quarter / 4)
    assert channel.is_open
    channel.tick(SILENCE_SECONDS + 0.1)
    assert (channel.is_open, reason(channel)) == (False, "silent")


@pytest.mark.parametrize("role", ["head", "follower"])
def test_a_side_that_was_busy_does_not_blame_the_other(role: str) -> None:
    """What the other sent meanwhile waits to be read."""
    pair = an_open_pair()
    busy, other = (pair.head, pair.follower) if role == "head" else (pair.follower, pair.head)
    for quarter in range(8):
        busy.tick(quarter / 4)
        other.tick(quarter / 4)
        pair.exchange(quarter / 4)
    busy.tick(1.75 + SILENCE_SECONDS)
    assert busy.is_open
    for quarter in range(1, int(4 * SILENCE_SECONDS)):
        busy.tick(1.75 + SILENCE_SECONDS + quarter / 4)
    assert reason(busy) == "silent"


@pytest.mark.parametrize("role", ["head", "follower"])
@pytest.mark.parametrize("late_seconds", [1.25, 3.0, SILENCE_SECONDS])
def test_a_side_that_is_busy_again_and_again_notices_silence(
    role: str, late_seconds: float
) -> None:
    """What it may excuse since the last answer is as long as the silence."""
    pair = an_open_pair()
    busy = pair.head if role == "head" else pair.follower
    now = 0.0
    while busy.is_open and now < 60:
        now += late_seconds
        busy.tick(now)
    assert reason(busy) == "silent"
    assert now <= 2 * SILENCE_SECONDS + late_seconds


def test_a_side_that_is_busy_again_and_again_keeps_a_peer_that_answers() -> None:
    """Each answer allows as much again."""
    pair = an_open_pair()
    now = 0.0
    while now < 60:
        for quarter in range(16):
            now += 0.25
            pair.follower.tick(now)
            if quarter == 15:
                pair.head.tick(now)
                pair.exchange(now)
    assert (reason(pair.head), reason(pair.follower)) == ("", "")


def test_what_is_late_does_not_keep_a_channel_open() -> None:
    """Frames that take longer and longer arrive steadily, but answer old heartbeats."""
    pair = an_open_pair()
    late: list[tuple[float, bytes]] = []
    now = 0.0
    while pair.follower.is_open and now < 60:
        now += 0.25
        pair.head.tick(now)
        pair.follower.tick(now)
        if up := pair.follower.outgoing():
            pair.head.received(up, now)
        if down := pair.head.outgoing():
            late.append((now, down))
        while late and late[0][0] <= now / 2:  # half of the time since the start
            pair.follower.received(late.pop(0)[1], now)
    assert reason(pair.follower) == "silent"
    assert now <= 2 * SILENCE_SECONDS + 2


def test_a_side_that_was_stopped_finds_out_before_it_reads() -> None:
    """It reads nothing that waited for it, since the other has given it up."""
    pair = an_open_pair()
    pair.head.send(Goodbye("old"))
    waiting = pair.head.outgoing()
    assert pair.follower.received(waiting, SILENCE_SECONDS + 0.1) == []
    assert reason(pair.follower) == "silent"


@pytest.mark.parametrize("message", [messages.NodeHeartbeat(2), messages.HeartbeatAnswer(1)])
def test_a_heartbeat_with_a_wrong_number_is_malformed(message: NodeMessage) -> None:
    """An answer to a question that was not asked proves nothing."""
    pair = an_open_pair()
    pair.follower.send(message)
    pair.exchange()
    assert reason(pair.head) == "malformed"


def test_nothing_is_sent_over_a_channel_that_is_not_open() -> None:
    """Neither before nor after."""
    head = a_channel("head")
    head.send(Goodbye("early"))
    assert head.outgoing() == b""
    pair = an_open_pair()
    pair.head.refuse("malformed", "why")
    pair.head.send(Goodbye("late"))
    assert pair.head.outgoing() == b""


@given(data=st.lists(st.binary(max_size=100), max_size=5))
def test_hostile_bytes_open_nothing(data: list[bytes]) -> None:
    """Framed or not, the first messages of a stranger raise nothing and are not believed."""
    for role in ("head", "follower"):
        raw, in_frames = a_channel(role), a_channel(role)
        for part in data:
            assert raw.received(part, 0) == []
            assert in_frames.received(framed(part), 0) == []
        assert not raw.is_open
        assert not in_frames.is_open


@given(data=st.binary(min_size=1, max_size=200), place=st.integers(0, 10_000))
def test_hostile_bytes_within_a_handshake_open_nothing(data: bytes, place: int) -> None:
    """Bytes inserted at any place of it end it, or wait for more."""
    pair = a_pair()
    hello = pair.follower.outgoing()
    pair.head.received(hello, 0)
    pair.follower.received(pair.head.outgoing(), 0)
    proof = pair.follower.outgoing()
    place %= len(proof)
    pair.head.received(proof[:place] + data, 0)
    assert not pair.head.is_open or proof.startswith(proof[:place] + data)


@given(data=st.binary(max_size=300))
def test_hostile_bytes_on_an_open_channel_are_not_believed(data: bytes) -> None:
    """Someone who cuts into the connection gets no message through."""
    pair = an_open_pair()
    assert pair.head.received(framed(data), 0) == []
    assert reason(pair.head) == "forged"
