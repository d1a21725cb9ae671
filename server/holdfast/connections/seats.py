"""Who may be connected at a time, and who goes for whom."""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum, auto
from typing import Protocol


class SeatKind(Enum):
    """What a connection may do."""

    WELCOME = auto()
    SPARE = auto()
    """Only ask after the health."""
    TOLD = auto()
    """Only hear why it is closed."""


class Evictable(Protocol):
    """What may be closed for another."""

    def make_room(self) -> None:
        """Close it; nothing of it may outlast this by more than an answer."""


class Seat:
    """The right of one connection to be there, from its accept until its socket is closed."""

    __slots__ = ("_owner", "kind")

    def __init__(self, seats: Seats, kind: SeatKind) -> None:
        self._owner: Seats | None = seats
        self.kind = kind

    def offer(self, evictable: Evictable) -> None:
        """From now on, and after all that were offered before, it may be closed for another."""
        if self._owner is not None:
            if self._owner.fresh:
                self._owner.fresh.pop(self, None)
            self._owner.offered[self] = evictable
            self._owner.offered.move_to_end(self)

    def offer_last(self, evictable: Evictable) -> None:
        """It may be closed for another if nothing else may: what it sent was not read yet."""
        if self._owner is not None:
            self._owner.fresh[self] = evictable

    def keep(self) -> None:
        """It may not be closed for another: it is at a request."""
        if self._owner is not None:
            if self._owner.fresh:
                self._owner.fresh.pop(self, None)
            self._owner.offered.pop(self, None)

    def release(self) -> None:
        """The connection is gone."""
        if self._owner is not None:
            self.keep()
            self._owner.taken -= 1
            self._owner = None


class Seats:
    """So many seats for connections of one kind."""

    def __init__(self, kind: SeatKind, seats: int, *, makes_room: bool = True) -> None:
        self._kind = kind
        self._seats = seats
        self._makes_room = makes_room
        self.taken = 0
        self.offered: OrderedDict[Seat, Evictable] = OrderedDict()
        """The seats that may be taken away, the one that was offered first before all others."""
        self.fresh: OrderedDict[Seat, Evictable] = OrderedDict()
        """Those that may be taken away after all of them."""

    def seat(self) -> Seat | None:
        """A seat, for which another may be closed; None if each is needed where it is."""
        if self.taken >= self._seats and not (self._makes_room and self.take_away()):
            return None
        self.taken += 1
        return Seat(self, self._kind)

    def take_away(self) -> bool:
        """Close the connection that was offered first; False if none is."""
        found = next(iter((self.offered or self.fresh).items()), None)
        if found is None:
            return False
        seat, evictable = found
        seat.release()
        evictable.make_room()
        return True
