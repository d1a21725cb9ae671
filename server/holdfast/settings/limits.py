"""The settings that bound what a request and its connection may ask of the front end."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.settings.flag import (
    flag,
    nesting_depth,
    positive_count,
    positive_seconds,
    positive_size_bytes,
    seconds,
)


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """What a request and its connection may ask of the front end. A time of 0 means no limit."""

    max_body_bytes: int = flag(
        "--max-body-size",
        positive_size_bytes,
        32 << 20,
        "SIZE",
        "maximum bytes of a request body, counted as they arrive; answer 413 beyond that",
        shown="32MiB",
    )
    max_buffered_bytes: int = flag(
        "--max-buffered-size",
        positive_size_bytes,
        512 << 20,
        "SIZE",
        "maximum bytes of all request bodies together, not counting the first 64 KiB of each; "
        "answer 429 beyond that. One API key, or one address without keys, may use at most half "
        "of what others have not taken",
        shown="512MiB",
    )
    max_json_depth: int = flag(
        "--max-json-depth",
        nesting_depth,
        128,
        "N",
        "maximum nesting of arrays and objects in a JSON body, 256 or less; answer 400 beyond that",
    )
    max_url_bytes: int = flag(
        "--max-url-length",
        positive_size_bytes,
        8 << 10,
        "SIZE",
        "maximum bytes of path and query; answer 414 beyond that",
        shown="8KiB",
    )
    max_headers: int = flag(
        "--max-headers",
        positive_count,
        100,
        "N",
        "maximum headers of a request; answer 431 beyond that",
    )
    max_header_bytes: int = flag(
        "--max-header-size",
        positive_size_bytes,
        64 << 10,
        "SIZE",
        "maximum bytes of all header names and values of a request; answer 431 beyond that",
        shown="64KiB",
    )
    header_timeout_seconds: float = flag(
        "--header-timeout",
        seconds,
        10.0,
        "SECONDS",
        "answer 408 if the request line and headers do not arrive within this time; close a new "
        "connection that sends nothing or does not finish its TLS handshake. 0 disables",
        shown="10",
    )
    body_timeout_seconds: float = flag(
        "--body-timeout",
        seconds,
        30.0,
        "SECONDS",
        "answer 408 if a request body averages less than 1 KiB/s over this time; 0 disables",
        shown="30",
    )
    send_timeout_seconds: float = flag(
        "--send-timeout",
        seconds,
        60.0,
        "SECONDS",
        "disconnect a client that reads less than about 64 KiB of a response in this time; 0 "
        "disables",
        shown="60",
    )
    websocket_idle_timeout_seconds: float = flag(
        "--websocket-idle-timeout",
        seconds,
        300.0,
        "SECONDS",
        "close a WebSocket with code 1001 if neither side sends anything for this long; 0 disables",
        shown="300",
    )
    request_timeout_seconds: float = flag(
        "--request-timeout",
        seconds,
        0.0,
        "SECONDS",
        "abort a request that takes longer than this and answer 504; 0 disables",
        shown="0 (none)",
    )
    grammar_timeout_seconds: float = flag(
        "--grammar-timeout",
        positive_seconds,
        30.0,
        "SECONDS",
        "answer 400 if a grammar (`response_format`, tools, `structured_outputs`) takes longer "
        "than this to compile",
        shown="30",
    )
    keep_alive_timeout_seconds: float | None = flag(
        "--keep-alive-timeout",
        seconds,
        None,
        "SECONDS",
        "close an idle connection this long after its last response",
        shown="`VLLM_HTTP_TIMEOUT_KEEP_ALIVE`, or 5",
    )
    max_connections: int | None = flag(
        "--max-connections",
        positive_count,
        None,
        "N",
        "maximum open connections. When full, the longest-idle one is closed; if none is idle, "
        "new ones get 503. Health and metrics are always answered",
        shown="16384, or fewer if the limit of open files is lower",
    )
