"""Which path does a request ask for? Judged once, so that who routes and who guards agree."""

from __future__ import annotations

from starlette.types import Scope


def own_path(scope: Scope, root_path: str) -> str:
    """The path as our routes are written: decoded, no root path, no slash at its end.

    A proxy may leave `root_path`, which ends in no slash, in the request or take it away.
    """
    path: str = scope["path"].removeprefix(scope.get("root_path", "") or root_path)
    return path.rstrip("/") or "/"
