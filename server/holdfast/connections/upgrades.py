"""Requests that offer another protocol: which are taken up, and what the others are without it.

A server may ignore the offer (RFC 9110, 7.8), and goes on in HTTP/1.1; the parser does not, and
takes what follows the headers for the other protocol. Java's HTTP client offers h2c with the first
request of a connection, whatever its method.
"""

from __future__ import annotations

from collections.abc import Iterable

Headers = Iterable[tuple[bytes, bytes]]

_OF_AN_OFFER = frozenset({b"upgrade", b"http2-settings"})


def announces_body(headers: Headers) -> bool:
    """Whether a body is to follow the headers."""
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0 \t"))
        for name, value in headers
    )


def without_offer(method: bytes, url: bytes, version: str, headers: Headers) -> bytes:
    """The head of a request as it would be without the offer; the body follows as it was sent."""
    lines = [b"%b %b HTTP/%b" % (method, url, version.encode())]
    for name, value in headers:
        if name == b"connection":
            options = [option.strip() for option in value.split(b",")]
            value = b", ".join(o for o in options if o.lower() not in _OF_AN_OFFER)  # noqa: PLW2901 - the header, cut
        if name not in _OF_AN_OFFER and (value or name != b"connection"):
            lines.append(name + b": " + value)
    return b"\r\n".join([*lines, b"", b""])
