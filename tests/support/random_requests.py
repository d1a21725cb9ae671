"""Requests of random shape against a server that is READY, and what they may not change."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from servers import Server

MAX_TOKENS = 8192
MAX_CONCURRENT = 16
TOKEN_IDS = range(20, 200)
PEAK_TOKENS = 232
"""Where the need of the non-monotone model peaks."""


def send_random_requests(server: Server, count: int, seed: int, longest_tokens: int) -> None:
    """Send `count` of them, some at once and some alone; AssertionError if one is not 200."""
    chosen = random.Random(seed)
    server.get("/livez")  # so that threads need not find out where it listens
    with ThreadPoolExecutor(MAX_CONCURRENT) as clients:
        for wave in _waves(chosen, count):
            bodies = [_body(chosen, server.model, longest_tokens) for _ in range(wave)]
            for answer in clients.map(lambda body: server.post("/v1/completions", body), bodies):
                assert answer.status_code == 200, answer.text


def workspace_totals(server: Server) -> list[dict[str, Any]]:
    """What may not change after READY: growths, rejections, and all that is held."""
    names = ("growths", "rejections", "retired_bytes", "persistent_bytes")
    return [
        {name: rank[name] for name in names}
        | {"size_bytes": [slot["size_bytes"] for slot in rank["slots"]]}
        for rank in server.status["workspace"]
    ]


def _waves(chosen: random.Random, count: int) -> Iterator[int]:
    while count:
        wave = min(count, chosen.choice((1, 1, 2, chosen.randint(3, MAX_CONCURRENT))))
        yield wave
        count -= wave


def _body(chosen: random.Random, model: str, longest_tokens: int) -> Mapping[str, Any]:
    copies = chosen.choice((1, 1, 1, 2, 4))
    new_tokens = chosen.choice((1, 1, 2, chosen.randint(3, 24)))
    body = {
        "model": model,
        "prompt": _prompt(chosen, longest_tokens - new_tokens),
        "max_tokens": new_tokens,
        "n": copies,
        "temperature": chosen.choice((0.0, 0.7)) if copies == 1 else 1.0,
        "ignore_eos": True,
    }
    if chosen.random() < 0.3:
        body["logprobs"] = chosen.randint(0, 5)
    if chosen.random() < 0.2:
        body["seed"] = chosen.randint(0, 9)
    return body


def _prompt(chosen: random.Random, most_tokens: int) -> list[int]:
    """Token ids: half of the prompts continue one of few texts, so that the cache is hit."""
    length = chosen.choice((_length(chosen, most_tokens), chosen.randint(1, 64), PEAK_TOKENS))
    length = min(length, most_tokens)
    text = random.Random(chosen.randrange(3 if chosen.random() < 0.5 else 1 << 30))
    known = text.choices(TOKEN_IDS, k=most_tokens)[: chosen.randint(0, length)]
    return known + chosen.choices(TOKEN_IDS, k=length - len(known))


def _length(chosen: random.Random, most_tokens: int) -> int:
    """Every order of magnitude is as likely as another."""
    return max(1, int(most_tokens ** chosen.random()))
