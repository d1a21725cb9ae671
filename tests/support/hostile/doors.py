"""Attacks on what a key opens and on what everybody reads: routes, keys, metrics, logs, media."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

from hostile.connections import WEBSOCKET
from hostile.target import KIB, QUERY_MARK, Outcomes, Target, told

OPERATOR_ROUTES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "/scale_elastic_ep": {"new_data_parallel_size": 2},
        "/is_scaling_elastic_ep": {},
        "/start_profile": {},
        "/stop_profile": {},
        "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "/etc"},
        "/v1/unload_lora_adapter": {"lora_name": "x"},
        "/fault_tolerance/apply": {},
        "/inference/v1/abort_requests": {"request_ids": ["x"]},
        "/pause": {},
        "/resume": {},
        "/sleep": {},
        "/wake_up": {},
        "/collective_rpc": {"method": "shutdown"},
        "/reset_prefix_cache": {},
        "/reset_mm_cache": {},
        "/update_weights": {},
        "/init_weight_transfer_engine": {},
        "/server_info": {},
        "/admin/restart": {},
        "/admin/drain": {},
        "/admin/probe": {},
        "/admin/sleep": {},
        "/admin/log-level": {"level": "DEBUG"},
    }
)


async def operator_routes(target: Target) -> Outcomes:
    """What only an operator may tell a server, with the key of a client."""
    return await told(target.post(path, body, 10) for path, body in OPERATOR_ROUTES.items())


async def guessed_keys(target: Target) -> Outcomes:
    """Keys that are almost right, empty, long or doubled."""
    guesses = ("", target.key[:-1], target.key + "x", target.key.upper(), QUERY_MARK * 200, "\xff")
    forms = ("Bearer {}", "bearer {}", "Basic {}", "{}", "Bearer  {}", "Bearer {} {}")
    headers = [
        {"Authorization": form.format(guess, guess)} for guess in guesses for form in forms
    ] + [{"X-Api-Key": guess} for guess in guesses]
    return await told(target.get("/v1/models", header, has_key=False) for header in headers)


async def scrapes(target: Target) -> Outcomes:
    """Every format of the metrics that a header can ask for, from many at once."""
    kinds = ("application/openmetrics-text", "text/plain", "application/json", "x/y")
    accepted = [
        f"{kind}; version=1.{target.chosen.randrange(10**6)}; escaping={target.chosen.random()}"
        for kind in kinds
        for _ in range(8)
    ]
    return await told(
        target.get("/metrics", {"Accept": accept, "Accept-Encoding": "gzip"}, has_key=False)
        for accept in accepted
    )


async def secrets_in_queries(target: Target) -> Outcomes:
    """Keys and tokens where they do not belong, which no log may hold."""
    query = f"?api_key={QUERY_MARK}-{target.chosen.random()}&token={QUERY_MARK}"
    heads = (
        target.head("GET", f"/v1/x{query}", WEBSOCKET),
        target.head("GET", f"/v1/realtime{query}", WEBSOCKET, has_key=False),
        target.head("GET", f"/v1/models{query}", {"Connection": "close"}),
        target.head("GET", f"/livez{query}", {"Connection": "close"}, has_key=False),
        target.head("GET", f"/nowhere{query}", {"Connection": "close", "X-Request-Id": "a\tb"}),
        target.head("GET", f"/\x01{query}", has_key=False),
    )
    return await told(target.said(head, 5) for head in heads)


async def floods_of_health(target: Target) -> Outcomes:
    """The routes that need no key, from as many connections as there are."""
    routes = ("/livez", "/readyz", "/health", "/statusz", "/startupz", "/ping")
    answers = await asyncio.gather(
        *(target.get(target.chosen.choice(routes), has_key=False) for _ in range(200))
    )
    return Outcomes(answers)


async def media(target: Target) -> Outcomes:
    """Addresses that only the server reaches, and data that is not a picture."""
    urls = (
        f"http://127.0.0.1:{target.port}/metrics",
        "http://169.254.169.254/latest/meta-data/",
        "file:///etc/passwd",
        "data:image/png;base64," + "A" * 64 * KIB,
        "http://[::1]/",
    )
    contents = [
        [{"type": kind, kind: {"url": url}}]
        for kind in ("image_url", "audio_url", "video_url")
        for url in urls
    ]
    return await told(
        target.chat({"messages": [{"role": "user", "content": content}]}, 10)
        for content in contents
    )


ATTACKS: Mapping[str, Callable[[Target], Awaitable[Outcomes]]] = MappingProxyType(
    {
        "operator routes": operator_routes,
        "guessed keys": guessed_keys,
        "scrapes": scrapes,
        "secrets in queries": secrets_in_queries,
        "floods of health": floods_of_health,
        "media": media,
    }
)
