"""What the machines of head and follower ask their caller to do, and what they report to it."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.labels import NodeRefusalReason
from holdfast.nodes.messages import Start
from holdfast.records import Death, RankStats


@dataclass(frozen=True, slots=True)
class Send:
    """Write to the connection."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the connection once everything has been written."""


@dataclass(frozen=True, slots=True)
class FindFacts:
    """Find out what this node has, for that model; call `facts_found`, or `facts_missing`."""

    model: str


@dataclass(frozen=True, slots=True)
class StartEngine:
    """Start the processes of the generation; call `engine_lost` or `engine_ended` if they end."""

    order: Start


@dataclass(frozen=True, slots=True)
class StopEngine:
    """End every process of the generation; then call `engine_ended`."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End this process, since trying again would not help."""

    line: str


FollowerAction = Send | Disconnect | FindFacts | StartEngine | StopEngine | GiveUp


@dataclass(frozen=True, slots=True)
class SendTo:
    """Write to the connection of a peer."""

    peer: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Drop:
    """Close the connection of a peer once everything has been written."""

    peer: int


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """A connection was refused; count it."""

    reason: NodeRefusalReason
    line: str


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A follower waits for a generation."""

    node: str


@dataclass(frozen=True, slots=True)
class NodeLeft:
    """A follower that had joined is gone."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class RanksChanged:
    """New statistics of all ranks of a follower, with times of this node's clock."""

    generation: int
    node: str
    ranks: tuple[RankStats, ...]
    is_compiling: bool
    """Whether one of them waits for a compiler."""


@dataclass(frozen=True, slots=True)
class GenerationLost:
    """A generation cannot go on; the followers have been told to end it."""

    generation: int
    node: str
    reason: str
    death: Death | None
    """What a rank of the node died of; None if the node itself is lost."""


@dataclass(frozen=True, slots=True)
class GenerationOver:
    """No follower that can be reached has a process of the generation."""

    generation: int


HeadReport = PeerRefused | NodeJoined | NodeLeft | RanksChanged | GenerationLost | GenerationOver
HeadAction = SendTo | Drop | HeadReport
