"""Frames on the wire: a length of four bytes, then that many bytes.

Before the proof a frame is a payload. After it, each frame ends with a MAC over its payload and its
number, under a key of that connection and direction.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator

from holdfast.labels import NodeRefusalReason

LENGTH_BYTES = 4
MAC_BYTES = 32
MAX_OPENING_BYTES = 512
"""The largest frame of a peer that has not proven the shared key."""
MAX_FRAME_BYTES = 256 * 1024
MAX_PAYLOAD_BYTES = MAX_FRAME_BYTES - MAC_BYTES
"""The longest message after the proof."""


class PeerError(ValueError):
    """What the peer sent ends the connection, for this reason."""

    def __init__(self, reason: NodeRefusalReason, text: str) -> None:
        super().__init__(text)
        self.reason: NodeRefusalReason = reason


def framed(content: bytes) -> bytes:
    """Return a frame with that content."""
    return len(content).to_bytes(LENGTH_BYTES, "big") + content


class FrameBuffer:
    """Cuts what arrives into frames. It never holds more than one read and one frame."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self.limit_bytes = MAX_OPENING_BYTES

    def add(self, data: bytes) -> None:
        """Append what was read."""
        self._bytes += data

    def frames(self) -> Iterator[bytes]:
        """Yield the content of each frame that is complete, under the limit as of that moment.

        Raises:
            PeerError: the next one announces more than the limit.
        """
        while len(self._bytes) >= LENGTH_BYTES:
            length = int.from_bytes(self._bytes[:LENGTH_BYTES], "big")
            if length > self.limit_bytes:
                raise PeerError("oversized", f"a frame of {length} bytes is over the limit")
            end = LENGTH_BYTES + length
            if len(self._bytes) < end:
                return
            content = bytes(self._bytes[LENGTH_BYTES:end])
            del self._bytes[:end]
            yield content


class Sealer:
    """Numbers the frames of one direction, and adds the MAC to each."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def sealed(self, payload: bytes) -> bytes:
        """Return the next frame.

        Raises:
            ValueError: the payload is longer than a peer accepts.
        """
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"a message of {len(payload)} bytes is too long to send")
        self._number += 1
        return framed(payload + _mac(self._key, self._number, payload))


class Opener:
    """Checks the MAC of each frame of one direction, in their order."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def opened(self, content: bytes) -> bytes:
        """Return the payload of the next frame.

        Raises:
            PeerError: it was changed, left out, repeated, moved, or made without the key.
        """
        self._number += 1
        payload, mac = content[:-MAC_BYTES], content[-MAC_BYTES:]
        if not hmac.compare_digest(mac, _mac(self._key, self._number, payload)):
            raise PeerError("forged", "a frame has a wrong MAC")
        return payload


def _mac(key: bytes, number: int, payload: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + payload, hashlib.sha256)
