"""One side of a connection between head and follower, without socket and without clock.

Bytes go in and out; the caller passes the time, in seconds of any clock that does not jump back.
After the proofs, each side sends a heartbeat every second and answers those of the other. A channel
fails when its newest heartbeat that was answered is `SILENCE_SECONDS` old: what has arrived may
have been under way for long, but an answer shows that the peer was there after the question. The
time for which this process was itself busy is not the peer's silence, up to `SILENCE_SECONDS` in
all since that answer.
"""

from __future__ import annotations

import hmac
import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

from holdfast.labels import NodeRefusalReason
from holdfast.nodes.frames import MAX_FRAME_BYTES, FrameBuffer, Opener, PeerError, Sealer, framed
from holdfast.nodes.messages import (
    PROTOCOL,
    Challenge,
    HeartbeatAnswer,
    Hello,
    KeyProof,
    NodeHeartbeat,
    NodeMessage,
    Rejected,
    decoded,
    decoded_opening,
    encoded,
)
from holdfast.nodes.proof import Secrets, secrets_of

HANDSHAKE_SECONDS = 5.0
"""The time from the connection to the proof of the key."""
HEARTBEAT_SECONDS = 1.0
SILENCE_SECONDS = 5.0
LATE_SECONDS = 1.0
"""A longer time without any event, ticks included, means that this process was itself late."""

Role = Literal["head", "follower"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a channel has ended."""

    reason: NodeRefusalReason | Literal["silent"]
    line: str


class Channel:
    """Proves the key, then carries messages until it fails; it never recovers."""

    def __init__(self, role: Role, key: bytes, nonce: bytes, now_seconds: float) -> None:
        """Begin the handshake; `nonce` must be random and new."""
        self._role = role
        self._key = key
        self._begun_seconds = now_seconds
        self._seen_seconds = now_seconds
        """The time of the last event."""
        self._buffer = FrameBuffer()
        self._out = bytearray()
        self._greeting = encoded(
            Hello(PROTOCOL, nonce.hex()) if role == "follower" else Challenge(PROTOCOL, nonce.hex())
        )
        self._secrets: Secrets | None = None
        self._sealer: Sealer | None = None
        self._opener: Opener | None = None
        self._pulse = _Pulse(now_seconds)
        self.failure: Failure | None = None
        if role == "follower":
            self._out += framed(self._greeting)

    @property
    def is_open(self) -> bool:
        """Whether the peer has proven the key, and the channel has not failed."""
        return self._opener is not None and self.failure is None

    def outgoing(self) -> bytes:
        """Return, and forget, the bytes that are to be sent; there may be some after a failure."""
        data = bytes(self._out)
        self._out.clear()
        return data

    def send(self, message: NodeMessage) -> None:
        """Send a message; nothing happens unless the channel is open."""
        if self.is_open and self._sealer is not None:
            self._out += self._sealer.sealed(encoded(message))

    def received(self, data: bytes, now_seconds: float) -> list[NodeMessage]:
        """Return the messages that are complete with `data`, except heartbeats.

        Look at `failure` after handling them.
        """
        self._check_deadline(now_seconds)
        messages: list[NodeMessage] = []
        if self.failure is not None:
            return messages
        self._buffer.add(data)
        try:
            for content in self._buffer.frames():
                if self._opener is None:
                    self._take_opening(content, now_seconds)
                    continue
                message = decoded(self._opener.opened(content))
                if not self._take_heartbeat(message):
                    messages.append(message)
        except PeerError as error:
            self._fail(error.reason, str(error))
        except ValueError as error:
            self._fail("malformed", str(error))
        return messages

    def tick(self, now_seconds: float) -> None:
        """Send a heartbeat if one is due, and fail if the peer is too late. Call it often."""
        self._check_deadline(now_seconds)
        if self.is_open and (number := self._pulse.due(now_seconds)):
            self.send(NodeHeartbeat(number))

    def refuse(self, reason: NodeRefusalReason, line: str) -> None:
        """Fail because of what an open channel carried."""
        self._fail(reason, line)

    def _check_deadline(self, now_seconds: float) -> None:
        """Fail if the peer is too late; what it sent may wait unread if this process was late."""
        if self.failure is not None:
            return
        unseen_seconds = now_seconds - self._seen_seconds
        self._seen_seconds = now_seconds
        # After a longer time the peer has given this side up.
        if LATE_SECONDS < unseen_seconds <= SILENCE_SECONDS:
            self._pulse.excuse(unseen_seconds)
        if self._opener is None:
            if now_seconds - self._begun_seconds > HANDSHAKE_SECONDS:
                self._fail("too_slow", f"it proved no key within {HANDSHAKE_SECONDS:g} s")
        elif now_seconds - self._pulse.alive_seconds > SILENCE_SECONDS:
            self._fail("silent", f"it answered no heartbeat for {SILENCE_SECONDS:g} s")

    def _take_opening(self, content: bytes, now_seconds: float) -> None:
        match decoded_opening(content):
            case Rejected(reason) if self._role == "follower":
                raise PeerError(reason, "the head refuses this connection")
            case Hello(protocol) if self._role == "head" and self._secrets is None:
                self._check_protocol(protocol)
                self._write_opening(self._greeting)
                self._secrets = secrets_of(self._key, hello=content, challenge=self._greeting)
            case Challenge(protocol) if self._role == "follower" and self._secrets is None:
                self._check_protocol(protocol)
                self._secrets = secrets_of(self._key, hello=self._greeting, challenge=content)
                self._write_opening(encoded(KeyProof(self._secrets.follower_proof.hex())))
            case KeyProof(proof) if self._secrets is not None:
                self._check_proof(proof, self._secrets)
                self._open(self._secrets, now_seconds)
            case _:
                raise ValueError("a message of the handshake arrived out of order")

    def _check_protocol(self, protocol: int) -> None:
        if protocol != PROTOCOL:
            self._reject("wrong_protocol")
            raise PeerError(
                "wrong_protocol",
                f"it speaks version {protocol} of the protocol between nodes, and this node "
                f"version {PROTOCOL}",
            )

    def _check_proof(self, proof: str, secrets: Secrets) -> None:
        expected = secrets.follower_proof if self._role == "head" else secrets.head_proof
        if not hmac.compare_digest(bytes.fromhex(proof), expected):
            self._reject("wrong_key")
            raise PeerError("wrong_key", "it has another key")

    def _open(self, secrets: Secrets, now_seconds: float) -> None:
        if self._role == "head":
            self._write_opening(encoded(KeyProof(secrets.head_proof.hex())))
            self._sealer, self._opener = (
                Sealer(secrets.head_frames),
                Opener(secrets.follower_frames),
            )
        else:
            self._sealer, self._opener = (
                Sealer(secrets.follower_frames),
                Opener(secrets.head_frames),
            )
        self._buffer.limit_bytes = MAX_FRAME_BYTES
        self._pulse = _Pulse(now_seconds)

    def _reject(self, reason: NodeRefusalReason) -> None:
        if self._role == "head":
            self._write_opening(encoded(Rejected(reason)))

    def _write_opening(self, payload: bytes) -> None:
        self._out += framed(payload)

    def _take_heartbeat(self, message: NodeMessage) -> bool:
        match message:
            case NodeHeartbeat(number):
                self._pulse.check_heartbeat(number)
                self.send(HeartbeatAnswer(number))
            case HeartbeatAnswer(number):
                self._pulse.take_answer(number)
            case _:
                return False
        return True

    def _fail(self, reason: NodeRefusalReason | Literal["silent"], line: str) -> None:
        if self.failure is None:
            self.failure = Failure(reason, line)


class _Pulse:
    """Which heartbeats were sent and answered."""

    def __init__(self, now_seconds: float) -> None:
        self.alive_seconds = now_seconds
        """When the newest heartbeat that was answered was sent, or later if that is excused."""
        self._excused_seconds = 0.0
        self._sent: deque[tuple[int, float]] = deque()
        self._last_seconds = -math.inf
        self._number = 0
        self._peer_number = 0

    def due(self, now_seconds: float) -> int:
        """Return the number of the next heartbeat if it is due, otherwise 0."""
        if now_seconds - self._last_seconds < HEARTBEAT_SECONDS:
            return 0
        self._last_seconds = now_seconds
        self._number += 1
        self._sent.append((self._number, now_seconds))
        return self._number

    def check_heartbeat(self, number: int) -> None:
        """Require that the peer counts its heartbeats."""
        if number != self._peer_number + 1:
            raise ValueError("a heartbeat has a wrong number")
        self._peer_number = number

    def take_answer(self, number: int) -> None:
        """Require that it answers the oldest heartbeat that has not been answered."""
        if not self._sent or self._sent[0][0] != number:
            raise ValueError("an answer to a heartbeat that was never sent")
        _, self.alive_seconds = self._sent.popleft()
        self._excused_seconds = 0.0

    def excuse(self, busy_seconds: float) -> None:
        """Take off a time for which this process was busy, within the limit since an answer."""
        granted_seconds = min(busy_seconds, SILENCE_SECONDS - self._excused_seconds)
        self._excused_seconds += granted_seconds
        self.alive_seconds += granted_seconds
