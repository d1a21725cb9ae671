"""The page at `/ui`: static files without data, which a browser may keep, and a strict policy.

The files refer to each other relatively, so they also work below a prefix. Everything except
index.html is served under a name that contains a digest of all files, and never changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Self

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from holdfast.api.errors import openai_error
from holdfast.api.router import PAGE_PATH

INDEX = "index.html"
DIGEST_CHARACTERS = 16

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; font-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
SECURITY_HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "content-security-policy": CONTENT_SECURITY_POLICY,
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
)
MEDIA_TYPES: Mapping[str, str] = MappingProxyType(
    {
        ".css": "text/css",
        ".html": "text/html",
        ".ico": "image/x-icon",
        ".js": "text/javascript",
        ".json": "application/json",
        ".png": "image/png",
        ".svg": "image/svg+xml",
        ".woff2": "font/woff2",
    }
)
"""By suffix; any other file is plain text."""

_WRITTEN_PREFIX = b"ui/static/"
"""How index.html refers to the other files; it is served with the digest in place of `static`."""
_REVALIDATED = "no-cache"
_NEVER_CHANGES = "public, max-age=31536000, immutable"


@dataclass(frozen=True, slots=True)
class StaticFiles:
    """The files of the page in memory, by their paths, and a digest of all of them."""

    contents: Mapping[str, bytes]
    digest: str

    @classmethod
    def read(cls, directory: Traversable | None = None) -> Self:
        """Read a directory; by default, that of this package."""
        contents = dict(sorted(_contents(directory or files(__package__).joinpath("static"))))
        digest = hashlib.sha256()
        for name, content in contents.items():
            digest.update(f"{name} {len(content)}:".encode())
            digest.update(content)
        return cls(MappingProxyType(contents), digest.hexdigest()[:DIGEST_CHARACTERS])

    def is_shell(self, path: str, *, is_text: bool) -> bool:
        """Whether a path, given as by `api.router.route_path`, is that of a file without data."""
        if path == PAGE_PATH:
            return not is_text
        return path.removeprefix(f"{PAGE_PATH}/{self.digest}/") in self.contents

    def index(self) -> bytes:
        """Return the page, which refers to the present files."""
        return self.contents[INDEX].replace(_WRITTEN_PREFIX, f"ui/{self.digest}/".encode())


def asks_for_text(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a client wants the page as text; every browser asks for HTML."""
    return not any(name == b"accept" and b"text/html" in value for name, value in headers)


def shell_routes(shell: StaticFiles, text: Callable[[], Awaitable[str]]) -> list[Route]:
    """Return the routes of the page, which is `text` for clients that do not ask for HTML."""
    index = shell.index()
    etag = f'"{hashlib.sha256(index).hexdigest()[:DIGEST_CHARACTERS]}"'

    async def page(request: Request) -> Response:
        if request.scope.get("raw_path", b"").endswith(b"/"):
            # The page refers to its files relatively to a path without a final slash.
            return RedirectResponse(f"../{PAGE_PATH.strip('/')}", 308, headers=SECURITY_HEADERS)
        if asks_for_text(request.scope["headers"]):
            return PlainTextResponse(await text(), headers=_with_cache_control("no-store"))
        headers = _with_cache_control(_REVALIDATED) | {"etag": etag}
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(index, media_type=MEDIA_TYPES[".html"], headers=headers)

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        content = shell.contents.get(name)
        if content is None or request.path_params["digest"] != shell.digest:
            return openai_error(
                "Not found: the page has no such file.",
                kind="not_found_error",
                status=404,
                headers=_with_cache_control("no-store"),
            )
        media_type = MEDIA_TYPES.get(PurePosixPath(name).suffix, "text/plain")
        return Response(content, media_type=media_type, headers=_with_cache_control(_NEVER_CHANGES))

    return [
        Route(PAGE_PATH, page, methods=("GET", "HEAD")),
        Route(f"{PAGE_PATH}/{{digest}}/{{name:path}}", file, methods=("GET", "HEAD")),
    ]


def _with_cache_control(value: str) -> dict[str, str]:
    return {**SECURITY_HEADERS, "cache-control": value, "vary": "accept"}


def _contents(directory: Traversable, prefix: str = "") -> list[tuple[str, bytes]]:
    found = []
    for entry in directory.iterdir():
        path = f"{prefix}{entry.name}"
        if entry.is_dir():
            found += _contents(entry, f"{path}/")
        else:
            found.append((path, entry.read_bytes()))
    return found
