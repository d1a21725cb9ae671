"""Who knows what a model will need? The registry of reservers, and those that Holdfast brings.

A package declares the need of its models with an entry point of the group `holdfast.reservers`: a
function from `ReserverContext` to terms. A model may instead call `reserve_workspace` while it is
built or warmed up. A term holds for every ubatch of the lanes that it names.
"""

from __future__ import annotations

from holdfast.workspace.reservers.registry import (
    GROUP,
    Device,
    Reserver,
    ReserverContext,
    Survey,
    Undetermined,
    declared_terms,
    reserve_workspace,
    survey,
)

__all__ = [
    "GROUP",
    "Device",
    "Reserver",
    "ReserverContext",
    "Survey",
    "Undetermined",
    "declared_terms",
    "reserve_workspace",
    "survey",
]
