"""The errors that a client gets when it exceeds a limit of its connection."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

from holdfast.errors import RETRY_AFTER_SECONDS, RefusedError, openai_error_body
from holdfast.request_context import REQUEST_ID_HEADER, request_id_from


def malformed() -> RefusedError:
    """Return the error for bytes that are not HTTP."""
    return RefusedError("The request is not valid HTTP/1.1.", reason="malformed", http_status=400)


def url_too_long(max_bytes: int) -> RefusedError:
    """Return the error for a request line that is too long."""
    return RefusedError(
        f"The URL of the request is longer than {max_bytes} bytes (--max-url-length).",
        reason="url_too_long",
        http_status=414,
    )


def too_many_headers(max_headers: int) -> RefusedError:
    """Return the error for too many headers or trailers."""
    return RefusedError(
        f"The request has more than {max_headers} headers (--max-headers).",
        reason="too_many_headers",
        http_status=431,
    )


def headers_too_large(max_bytes: int) -> RefusedError:
    """Return the error for headers, trailers or chunk framing that are too large."""
    return RefusedError(
        f"The headers of the request are larger than {max_bytes} bytes (--max-header-size).",
        reason="headers_too_large",
        http_status=431,
    )


def slow_headers(seconds: float) -> RefusedError:
    """Return the error for headers that were not complete in time."""
    return RefusedError(
        f"The headers of the request did not arrive within {seconds:g} s (--header-timeout).",
        reason="slow_headers",
        http_status=408,
    )


def body_too_large(max_bytes: int) -> RefusedError:
    """Return the error for a body that is too large, as announced or as received."""
    return RefusedError(
        f"The body of the request is larger than {max_bytes} bytes (--max-body-size).",
        reason="body_too_large",
        http_status=413,
    )


def slow_body(seconds: float) -> RefusedError:
    """Return the error for a body that arrives too slowly."""
    return RefusedError(
        f"The body of the request arrived at less than 1 KiB/s over {seconds:g} s "
        "(--body-timeout).",
        reason="slow_body",
        http_status=408,
    )


def too_many_connections(max_connections: int) -> RefusedError:
    """Return the error for a connection over the limit."""
    return RefusedError(
        f"All {max_connections} connections are in use (--max-connections).",
        reason="too_many_connections",
        http_status=503,
        openai_type="service_unavailable",
    )


def encoded(
    error: RefusedError,
    default_headers: Iterable[tuple[bytes, bytes]],
    *,
    received: Iterable[tuple[bytes, bytes]],
    has_body: bool,
) -> bytes:
    """Return the complete HTTP response, after which the connection is closed.

    `received` are the headers of the request, as far as they were read.
    """
    header = REQUEST_ID_HEADER.encode()
    request_id = request_id_from(value for name, value in received if name == header)
    body = openai_error_body(error.cause, kind=error.openai_type, status=error.http_status)
    phrase = HTTPStatus(error.http_status).phrase
    lines = [
        f"HTTP/1.1 {error.http_status} {phrase}".encode(),
        *(name + b": " + value for name, value in default_headers),
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        header + b": " + request_id.encode(),
        b"connection: close",
    ]
    if error.http_status == HTTPStatus.SERVICE_UNAVAILABLE:
        lines += [b"retry-after: %d" % RETRY_AFTER_SECONDS, b"x-should-retry: true"]
    return b"\r\n".join([*lines, b"", body if has_body else b""])
