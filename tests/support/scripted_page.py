"""The status page of a server that is only a script: a test sets what it says of itself."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette

from holdfast.status_page.feed import Feed
from holdfast.status_page.shell import StaticFiles, shell_routes
from holdfast.status_page.stream import stream_route
from holdfast.telemetry.logs import iso_time

DEADLINE_SECONDS = 60.0
MIB, GIB = 1024**2, 1024**3
HOUR = 3600.0
_POLL_SECONDS = 0.02


class ScriptedPage:
    """A server of the page, at `url`. `document` is what it shows; a test replaces the whole."""

    def __init__(self, port: int, document: dict[str, Any]) -> None:
        self.port = port
        self.document = document

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.port}/ui"

    def change(self, **members: object) -> None:
        """Say something else from now on; a member that is None is unknown."""
        changed = {**self.document, **members}
        self.document = {name: value for name, value in changed.items() if value is not None}


@contextmanager
def scripted_page(document: dict[str, Any], *, port: int = 0) -> Iterator[ScriptedPage]:
    """Serve the page in a thread of its own; at the end, the viewers are told that it stops."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        page = ScriptedPage(listener.getsockname()[1], document)
        has_to_end = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(_serve(page, listener, has_to_end)))
        thread.start()
        try:
            yield page
        finally:
            has_to_end.set()
            thread.join(DEADLINE_SECONDS)
            assert not thread.is_alive()


async def _serve(page: ScriptedPage, listener: socket.socket, has_to_end: threading.Event) -> None:
    feed = Feed(lambda: page.document)
    app = Starlette(routes=[stream_route(feed), *shell_routes(StaticFiles.read(), no_text)])
    config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    async with feed.running():
        while not has_to_end.is_set():  # noqa: ASYNC110 - the event belongs to another thread
            await asyncio.sleep(_POLL_SECONDS)
    server.should_exit = True
    await serving


async def no_text() -> str:
    """Nothing, in place of the page as text."""
    return ""


def ago(seconds: float) -> str:
    """A time of the document, this long before now."""
    return iso_time(time.time() - seconds)


def a_document() -> dict[str, Any]:
    """What a server says after twenty hours and one death, with every member there is."""
    return {
        "server": {
            "started": ago(20 * HOUR),
            "model": "scripted-model",
            "versions": {"holdfast": "0.1.0", "vllm": "0.32.0", "torch": "2.13.0"},
            "devices": ["Scripted GPU"],
            "driver": "580.95",
        },
        "state": "READY",
        "reason": "131071 tokens proven",
        "since": ago(3 * HOUR),
        "engine": {
            "generation": 2,
            "restarts": 1,
            "restarts_left": 4,
            "starts": 2,
            "last_start_seconds": 93.0,
            "last_exit": "worker_exit: rank 0 ended with SIGKILL",
        },
        "limits": {
            "max_model_len": 131072,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 8192,
            "kv_capacity_tokens": 1_310_720,
        },
        "start": {"phases_s": {"import": 9.1, "load": 41.0, "warmup": 12.2, "probe": 21.5}},
        "progress": {"running": 2, "waiting": 1, "last_step": ago(1)},
        "probe": _a_probe(),
        "proof": _a_proof(),
        "host_memory": {
            "available_bytes": 14 * GIB,
            "total_bytes": 128 * GIB,
            "is_unified": True,
        },
        "ranks": {"0/0": a_rank()},
        "nodes": {"left": {"is_joined": True}, "right": {"is_joined": False, "problem": "gone"}},
        "requests": _requests(),
        "timeline": _a_timeline(),
        "history": _a_history(),
    }


def a_start() -> dict[str, Any]:
    """What it says half a minute after it began, and half a minute before it will be ready."""
    return {
        **a_document(),
        "state": "PROBING",
        "reason": "running worst-case",
        "since": ago(5),
        "ready_expected": ago(-30),
        "activity": {
            "phase": "probe",
            "since": ago(5),
            "step": "full_context",
            "detail": "1 of 2",
            "tokens": 512,
        },
        "timeline": {
            "1": {
                "at": ago(30),
                "generation": 1,
                "kind": "state",
                "state": "STARTING",
                "reason": "",
            }
        },
    }


def a_rank(**differences: object) -> dict[str, Any]:
    """A locked rank with two workspaces, one of which has grown."""
    caller = "deepseek_v4_attention.py:1457:_forward_prefill"
    slots = {
        "0/0": _slot(0, 820 * MIB, 700 * MIB, 810 * MIB, caller),
        "1/0": _slot(1, 256 * MIB, 256 * MIB, 96 * MIB, "fused_moe.py:210:forward"),
    }
    return {
        "engine": 0,
        "rank": 0,
        "node": "left",
        "generation": 2,
        "is_locked": True,
        "is_sealed": True,
        "retired_bytes": 700 * MIB,
        "persistent_bytes": 64 * MIB,
        "lamport_bytes": 0,
        "growth_limit_bytes": 956 * MIB,
        "growths": {"warmup": 0, "sealed": 0, "locked": 1},
        "rejections": {"scratch": 1, "persistent": 0, "permute": 0},
        "last_rejection": {
            "kind": "scratch",
            "caller": caller,
            "needed_bytes": 4 * GIB,
            "held_bytes": 820 * MIB,
            "reason": "above the limit of growth",
        },
        "slots": slots,
        "memory": {
            "weights_bytes": 61 * GIB,
            "kv_cache_bytes": 32 * GIB,
            "cuda_graphs_bytes": 900 * MIB,
            "activation_peak_bytes": 2 * GIB,
            "non_torch_bytes": 1200 * MIB,
            "budget_bytes": 108 * GIB,
            "total_bytes": 120 * GIB,
        },
        "kv_used_ratio": 0.42,
        "nan_rows": 0,
        "steps": 1_204_331,
        "scheduled_tokens": 88_120_442,
        **differences,
    }


def ranks_on(*nodes: str, each: int = 8) -> dict[str, Any]:
    """The members of a document in which one engine has `each` ranks on each of these nodes."""
    return {
        "nodes": {node: {"is_joined": True} for node in nodes},
        "ranks": {
            f"0/{rank}": a_rank(rank=rank, node=nodes[rank // each])
            for rank in range(each * len(nodes))
        },
    }


def _slot(ubatch: int, size: int, reserved: int, high_water: int, caller: str) -> dict[str, Any]:
    return {
        "ubatch": ubatch,
        "lane": 0,
        "size_bytes": size,
        "reserved_bytes": reserved,
        "high_water_bytes": high_water,
        "high_water_caller": caller,
    }


def _a_probe() -> dict[str, Any]:
    steps = [
        ("first_token", "passed", 0.4, 8, ""),
        ("context_sweep", "passed", 9.2, 131071, ""),
        ("full_context", "passed", 4.4, 131071, ""),
        ("full_batch", "passed", 3.1, 8192, ""),
        ("baseline", "skipped", 0.0, 0, "there is no baseline"),
    ]
    return {
        "suite": "worst-case",
        "passed": True,
        "limited": False,
        "proven_tokens": 131071,
        "duration_seconds": 21.5,
        "finished": ago(3 * HOUR),
        "steps": [
            {
                "name": name,
                "outcome": outcome,
                "duration_seconds": seconds,
                "tokens": tokens,
                "limited": False,
                "reason": reason,
            }
            for name, outcome, seconds, tokens, reason in steps
        ],
    }


def _a_proof() -> dict[str, Any]:
    return {
        "nan_rows": 0,
        "baseline": {
            "probe": {"agrees": True, "worst_nats": 0.003, "compared": ago(3 * HOUR)},
            "canary": {"agrees": True, "worst_nats": 0.0014, "compared": ago(50)},
        },
        "verify": {
            "finished": ago(2 * HOUR),
            "verdict": "passed",
            "profile": "standard",
            "passed": 41,
            "failed": 0,
            "inconclusive": 1,
        },
    }


def _requests() -> dict[str, Any]:
    prefill = {"prompt_tokens": 96_000, "prefilled_tokens": 57_344, "output_tokens": 0}
    decode = {"prompt_tokens": 512, "prefilled_tokens": 512, "output_tokens": 130}
    every = {"generation": 2, "replays": 0}
    return {
        "in_flight": 3,
        "held": 1,
        "running": 2,
        "waiting": 1,
        "replayed": 2,
        "continued": 1,
        "refused": {"overloaded": 3},
        "lost": {"suspected": 1},
        "rows": {
            "17": {"stage": "prefill", "received": ago(19), "key": "key-1f0c", **every, **prefill},
            "18": {
                "stage": "decode",
                "received": ago(9),
                "key": "key-77aa",
                "output_tokens_per_second": 14.2,
                **every,
                **decode,
                "replays": 1,
            },
            "19": {"stage": "held", "received": ago(1), **every, "output_tokens": 0},
        },
        "rows_left_out": 0,
    }


def _a_timeline() -> dict[str, Any]:
    events: list[tuple[float, dict[str, object]]] = [
        (20 * HOUR, {"kind": "state", "state": "STARTING", "reason": "loading vLLM and the model"}),
        (20 * HOUR - 70, {"kind": "state", "state": "PROBING", "reason": "running worst-case"}),
        (20 * HOUR - 95, {"kind": "state", "state": "READY", "reason": "131071 tokens proven"}),
        (8 * HOUR, {"kind": "growth", "engine": 0, "ranks": [0], "phase": "locked", "growths": 1}),
        (3.2 * HOUR, {"kind": "death", "cause": "worker_exit", "reason": "rank 0: SIGKILL"}),
        (3.2 * HOUR, {"kind": "state", "state": "RECOVERING", "reason": "the engine died"}),
        (3 * HOUR, {"kind": "state", "state": "READY", "reason": "131071 tokens proven"}),
        (2 * HOUR, {"kind": "verify", "verdict": "passed", "profile": "standard"}),
    ]
    return {
        str(number): {"at": ago(seconds), "generation": 1 + (seconds <= 3 * HOUR), **event}
        for number, (seconds, event) in enumerate(events, start=1)
    }


def _a_history() -> dict[str, Any]:
    interval = 15
    last = int(time.time()) // interval
    return {
        "interval_seconds": interval,
        "points": {
            str(last - back): {
                "output_tokens_per_second": 120.0 + back % 17,
                "prompt_tokens_per_second": 2048.0 + 10 * (back % 29),
                "first_token_median_seconds": 0.3,
                "first_token_p99_seconds": 1.9,
                "first_tokens": 12,
                "running": 2 + back % 3,
                "waiting": back % 2,
                "kv_used_ratio": 0.42,
                **({} if back % 8 else _a_canary(0.001 + 0.0001 * (back % 5))),
            }
            for back in range(1, 200)
        },
    }


def _a_canary(worst_nats: float) -> dict[str, float]:
    return {"canary_agrees": True, "canary_worst_nats": worst_nats}
