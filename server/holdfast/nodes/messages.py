"""What head and follower say to each other, as frozen records.

A message is a JSON object whose `kind` is the name of its record in lower case. The first four
kinds open a connection and anyone may send them; all others are read only from a peer that has
proven the shared key. Both ends run the same version of Holdfast, so a message has exactly the
fields of its record.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import cast, get_args

from holdfast.labels import NodeRefusalReason
from holdfast.nodes import strict_json
from holdfast.records import Death, RankStats
from holdfast.settings.flag import is_node_name
from holdfast.workspace.plan import WorkspaceSpec

MAX_REASON_CHARACTERS = 4000
"""The maximum of a reason, which has to fit into a message: each takes up to 12 bytes there."""
PROTOCOL = 3
"""Changes whenever a message or the proof changes."""
NONCE_BYTES = 32
PROOF_BYTES = 32


@dataclass(frozen=True, slots=True)
class Hello:
    """Follower to head, first: the versions may differ only in what follows this message."""

    protocol: int
    nonce: str

    def __post_init__(self) -> None:
        _require_hex(self.nonce, NONCE_BYTES)


@dataclass(frozen=True, slots=True)
class Challenge:
    """Head to follower, first."""

    protocol: int
    nonce: str

    def __post_init__(self) -> None:
        _require_hex(self.nonce, NONCE_BYTES)


@dataclass(frozen=True, slots=True)
class KeyProof:
    """Either way: the sender has the shared key. The follower proves it first."""

    proof: str

    def __post_init__(self) -> None:
        _require_hex(self.proof, PROOF_BYTES)


@dataclass(frozen=True, slots=True)
class Rejected:
    """Head to follower, without proof: a hint for people, which anybody may have sent."""

    reason: NodeRefusalReason


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What has to be equal on every node of one engine; empty where there is no such thing."""

    holdfast_version: str
    holdfast_digest: str
    """The digest of the source code: builds of one version may differ."""
    vllm_version: str
    torch_version: str
    driver_version: str
    nccl_version: str
    plugins: str
    """The value of VLLM_PLUGINS, or `all`."""
    model_digest: str
    """The digest of the model's configuration and index, and of the sizes of its weights."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Head to follower, first after the proofs: what it takes to join."""

    model: str
    facts: NodeFacts


@dataclass(frozen=True, slots=True)
class Join:
    """Follower to head: what is here. `instance` is drawn by each process of a follower."""

    name: str
    instance: str
    facts: NodeFacts

    def __post_init__(self) -> None:
        if not is_node_name(self.name):
            raise ValueError("not a name of a node")
        _require_hex(self.instance, NONCE_BYTES)


@dataclass(frozen=True, slots=True)
class Welcome:
    """Head to follower: it has joined, and waits for a generation."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Head to follower: it may not join. `is_final` means that one of the two has to be changed."""

    reason: NodeRefusalReason
    line: str
    is_final: bool


@dataclass(frozen=True, slots=True)
class NodeHeartbeat:
    """Either way, each second: the number counts from 1 in each direction."""

    number: int


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    """Either way: the heartbeat with this number has arrived."""

    number: int


@dataclass(frozen=True, slots=True)
class Start:
    """Head to follower: run these ranks of a generation."""

    generation: int
    node_rank: int
    nodes: int
    master_address: str
    master_port: int
    """A new one in each generation, so that nothing that is left of the last one can interfere."""
    arguments: tuple[str, ...]
    """Flags of vLLM, without keys and without those of an address or a node."""
    fingerprint: str
    spec: WorkspaceSpec
    """The directory for statistics is the follower's own choice."""
    model: str = ""
    """The path of the model; empty if each node gets its own."""
    model_digest: str = ""
    """As in `NodeFacts`, on the head just before this start."""

    def __post_init__(self) -> None:
        is_valid = (
            self.generation > 0
            and 0 < self.node_rank < self.nodes
            and 0 < self.master_port < 65536
            and self.master_address
        )
        if not is_valid:
            raise ValueError("not a generation that can be started")


@dataclass(frozen=True, slots=True)
class End:
    """Head to follower: end all processes of the generation."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """Follower to head: the generation cannot go on, since a worker ended or a rank failed."""

    generation: int
    death: Death


@dataclass(frozen=True, slots=True)
class Ended:
    """Follower to head: no process of the generation is left.

    A driver may still be freeing its memory.
    """

    generation: int


@dataclass(frozen=True, slots=True)
class RankUpdate:
    """Follower to head: what changed in the statistics of its ranks.

    `recent_steps` are left out: every rank runs the steps that rank 0, on the head, reports. Times
    are of the follower's clock, which showed `sent_seconds` when this was sent.
    """

    generation: int
    sent_seconds: float
    ranks: tuple[RankStats, ...]
    is_compiling: bool
    """Whether a rank there waits for a compiler, in a step that takes long."""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Either way, last: the sender leaves on purpose."""

    reason: str


Opening = Hello | Challenge | KeyProof | Rejected
NodeMessage = (
    Terms
    | Join
    | Welcome
    | Refused
    | NodeHeartbeat
    | HeartbeatAnswer
    | Start
    | End
    | Lost
    | Ended
    | RankUpdate
    | Goodbye
)
_OPENINGS = {kind.__name__.lower(): kind for kind in get_args(Opening)}
_MESSAGES = {kind.__name__.lower(): kind for kind in get_args(NodeMessage)}


def encoded(message: Opening | NodeMessage) -> bytes:
    """Return the payload of a frame.

    Raises:
        ValueError: a number in it is not finite.
    """
    kind = type(message).__name__.lower().encode()
    record = strict_json.written(message)
    return b'{"kind":"' + kind + (b'"}' if record == b"{}" else b'",' + record[1:])


def decoded_opening(payload: bytes) -> Opening:
    """Return a message of a peer that has proven nothing yet.

    Raises:
        ValueError: it is not such a message.
    """
    return cast("Opening", _decoded(payload, _OPENINGS))


def decoded(payload: bytes) -> NodeMessage:
    """Return a message of a peer that has proven the shared key.

    Raises:
        ValueError: it is not such a message.
    """
    return cast("NodeMessage", _decoded(payload, _MESSAGES))


def _decoded(payload: bytes, kinds: dict[str, type]) -> object:
    value = strict_json.parsed(payload)
    if not isinstance(value, dict):
        raise ValueError("the message is not an object")  # noqa: TRY004 - one error for all
    kind = value.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError("the message is not of a kind that is expected here")
    return strict_json.as_record(kinds[kind], value)


def _require_hex(text: str, length_bytes: int) -> None:
    if not re.fullmatch(f"[0-9a-f]{{{2 * length_bytes}}}", text):
        raise ValueError("not as many hexadecimal digits as expected")
