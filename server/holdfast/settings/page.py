"""The setting of the status page; `holdfast.status_page` serves it."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.settings.flag import boolean, flag


@dataclass(frozen=True, slots=True)
class PageSettings:
    """Whether there is a status page."""

    is_on: bool = flag(
        "--ui",
        boolean,
        default=True,
        metavar="on|off",
        meaning="serve the status page at `/ui`, and the stream of `/statusz` for it and for "
        "`holdfast top`; with `off`, the server has neither",
        shown="on",
        choices=("on", "off"),
    )
