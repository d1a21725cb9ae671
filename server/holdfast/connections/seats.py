"""Who may be connected at a time, and who goes for whom."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

MakeRoom = Callable[[], None]
"""Closes a connection for another; nothing of it may outlast this by more than an answer."""


class Seat:
    """The right of one connection to be there, from its accept until its socket is closed."""

    __slots__ = ("_owner", "is_spare")

    def __init__(self, seats: Seats) -> None:
        self._owner: Seats | None = seats
        self.is_spare = seats.are_spare
        """Whether it is over the limit, where a connection may only ask after the health."""

    def offer(self, make_room: MakeRoom) -> None:
        """From now on, and after all that were offered before, it may be closed for another."""
        if self._owner is not None:
            if self._owner.fresh:
                self._owner.fresh.pop(self, None)
            self._owner.offered[self] = make_room
            self._owner.offered.move_to_end(self)

    def offer_last(self, make_room: MakeRoom) -> None:
        """It may be closed for another if nothing else may: what it sent was not read yet."""
        if self._owner is not None:
            self._owner.fresh[self] = make_room

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
    """As many seats as there may be connections up to the limit, or over it."""

    def __init__(self, seats: int, *, are_spare: bool = False) -> None:
        self._seats = seats
        self.are_spare = are_spare
        self.taken = 0
        self.offered: OrderedDict[Seat, MakeRoom] = OrderedDict()
        """The seats that may be taken away, the one that was offered first before all others."""
        self.fresh: OrderedDict[Seat, MakeRoom] = OrderedDict()
        """Those that may be taken away after all of them."""

    def seat(self) -> Seat | None:
        """A seat, for which another may be closed; None if each is needed where it is."""
        if self.taken >= self._seats and not self.take_away():
            return None
        self.taken += 1
        return Seat(self)

    def take_away(self) -> bool:
        """Close the connection that was offered first; False if none is."""
        found = next(iter((self.offered or self.fresh).items()), None)
        if found is None:
            return False
        seat, make_room = found
        seat.release()
        make_room()
        return True
