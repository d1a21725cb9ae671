"""Which path does a request ask for? Judged once, so that who routes and who guards agree."""

from __future__ import annotations

from starlette.types import Scope


def own_path(scope: Scope, root_path: str) -> str:
    """The path as our routes are written: decoded, no root path, no slash at its end.

    A proxy may leave the root path in the request or take it away.
    """
    return route_path(scope["path"], scope.get("root_path", "") or root_path)


def route_path(path: str, root_path: str) -> str:
    """The path of a route without `root_path`, which ends in no slash, and slashes at its end."""
    if path.startswith(f"{root_path}/"):
        path = path.removeprefix(root_path)
    return path.rstrip("/") or "/"
