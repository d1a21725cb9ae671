"""Which path does a request ask for? Judged once, so that who routes and who guards agree."""

from __future__ import annotations


def route_path(path: str, root_path: str) -> str:
    """The path as our routes are written: decoded, no root path, no slash at its end."""
    return below_root(path, root_path).rstrip("/") or "/"


def below_root(path: str, root_path: str) -> str:
    """The path without `root_path`, which a proxy may leave in the request or take away."""
    return path.removeprefix(root_path) if path.startswith(f"{root_path}/") else path
