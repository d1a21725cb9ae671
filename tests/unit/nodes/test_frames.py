"""Where a frame ends, and whether it came from the peer, at this place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.nodes.frames import (
    LENGTH_BYTES,
    MAC_BYTES,
    MAX_FRAME_BYTES,
    MAX_OPENING_BYTES,
    FrameBuffer,
    Opener,
    PeerError,
    Sealer,
    framed,
)

KEY = b"k" * 32


def content_of(frame: bytes) -> bytes:
    """A frame without its length."""
    return frame[LENGTH_BYTES:]


@given(
    contents=st.lists(st.binary(max_size=MAX_OPENING_BYTES), max_size=5),
    cuts=st.lists(st.integers(1, 700), max_size=20),
)
def test_frames_are_the_same_however_the_bytes_arrive(
    contents: list[bytes], cuts: list[int]
) -> None:
    """One by one, or all at once."""
    stream = b"".join(map(framed, contents))
    buffer, found = FrameBuffer(), list[bytes]()
    for cut in [*cuts, len(stream)]:
        buffer.add(stream[:cut])
        stream = stream[cut:]
        found += buffer.frames()
    assert found == contents


def test_an_oversized_frame_is_refused_before_it_arrives() -> None:
    """Its length says enough."""
    buffer = FrameBuffer()
    buffer.add((MAX_OPENING_BYTES + 1).to_bytes(LENGTH_BYTES, "big"))
    with pytest.raises(PeerError) as error:
        list(buffer.frames())
    assert error.value.reason == "oversized"


def test_the_limit_may_rise_between_two_frames_of_one_read() -> None:
    """The frame after the proof is longer."""
    buffer = FrameBuffer()
    buffer.add(framed(b"a") + framed(b"b" * (MAX_OPENING_BYTES + 1)))
    frames = buffer.frames()
    assert next(frames) == b"a"
    buffer.limit_bytes = MAX_FRAME_BYTES
    assert len(next(frames)) == MAX_OPENING_BYTES + 1


def test_sealed_frames_are_opened_in_their_order() -> None:
    """Equal payloads have different MACs."""
    sealer, opener = Sealer(KEY), Opener(KEY)
    frames = [sealer.sealed(b"same") for _ in range(3)]
    assert len(set(frames)) == 3
    assert [opener.opened(content_of(frame)) for frame in frames] == [b"same"] * 3


def is_forged(opener: Opener, content: bytes) -> bool:
    try:
        opener.opened(content)
    except PeerError as error:
        return error.reason == "forged"
    return False


def test_a_frame_is_accepted_only_at_its_place() -> None:
    """Not twice, not later, and not after one that was left out."""
    sealer = Sealer(KEY)
    first, second = (content_of(sealer.sealed(payload)) for payload in (b"1", b"2"))
    repeated = Opener(KEY)
    repeated.opened(first)
    assert is_forged(repeated, first)
    assert is_forged(Opener(KEY), second)


@given(place=st.integers(0, 200), bit=st.integers(0, 7), payload=st.binary(max_size=100))
def test_a_frame_with_another_bit_is_refused(place: int, bit: int, payload: bytes) -> None:
    """In the payload or in the MAC."""
    content = bytearray(content_of(Sealer(KEY).sealed(payload)))
    content[place % len(content)] ^= 1 << bit
    assert is_forged(Opener(KEY), bytes(content))


@given(content=st.binary(max_size=MAC_BYTES + 10))
def test_a_frame_without_a_mac_is_refused(content: bytes) -> None:
    """A short one too."""
    assert is_forged(Opener(KEY), content)


def test_a_frame_under_another_key_is_refused() -> None:
    """Such as the key of the other direction."""
    assert is_forged(Opener(b"x" * 32), content_of(Sealer(KEY).sealed(b"1")))


def test_what_no_peer_would_accept_is_not_sent() -> None:
    """The sender finds out."""
    Sealer(KEY).sealed(b"x" * (MAX_FRAME_BYTES - MAC_BYTES))
    with pytest.raises(ValueError, match="too long"):
        Sealer(KEY).sealed(b"x" * (MAX_FRAME_BYTES - MAC_BYTES + 1))
