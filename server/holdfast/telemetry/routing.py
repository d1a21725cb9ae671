"""The page that routers read: a few gauges over all engines, without a label that tells them apart.

llm-d's router reads each replica twenty times a second, and takes one sample of a name, whatever
its labels (https://github.com/kubernetes-sigs/gateway-api-inference-extension/issues/2950). So the
page is written from numbers in memory, and no registry is asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType

from holdfast.telemetry.load import Load
from holdfast.telemetry.metrics import BY_NAME
from holdfast.telemetry.vllm_gauges import KV_USAGE, RUNNING, WAITING

OPENMETRICS_END = "# EOF\n"
_ESCAPES = MappingProxyType({ord("\\"): r"\\", ord('"'): r"\"", ord("\n"): r"\n"})


@dataclass(frozen=True, slots=True)
class Routing:
    """What routers are told of one moment."""

    load: Load
    is_ready: bool
    """Whether requests are admitted. If not, the page shows the load as saturated."""
    proven_tokens: int = 0
    """The longest context that the last probe proved; 0 before the first."""
    kv_block_tokens: int = 0
    kv_blocks: int = 0
    """The blocks of all KV caches together; 0 before the first engine."""
    max_loras: int = 0
    """How many adapters one batch may have; 0 without LoRA."""
    unix_seconds: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class RoutingSeries:
    """One series of the page, which is always a gauge."""

    name: str
    help: str
    sample: Callable[[Routing, Load], str]
    """Returns its labels and its value; empty if it is not known."""
    labels: tuple[str, ...] = ()


def _kv_usage(_: Routing, load: Load) -> str:
    return "" if load.kv_usage is None else f" {load.kv_usage}"


def _cache_config(now: Routing, _: Load) -> str:
    if not now.kv_blocks:
        return ""
    return f'{{block_size="{now.kv_block_tokens}",num_gpu_blocks="{now.kv_blocks}"}} 1'


def _loras(now: Routing, load: Load) -> str:
    if not now.max_loras:
        return ""
    running, waiting = (
        ",".join(names).translate(_ESCAPES) for names in (load.running_loras, load.waiting_loras)
    )
    labels = (
        f'max_lora="{now.max_loras}",'
        f'running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
    )
    # As in vLLM, the value is the time of the report, by which a router finds the newest.
    return f"{{{labels}}} {now.unix_seconds:.3f}"


ROUTING_SERIES = (
    RoutingSeries(
        WAITING,
        "Requests accepted and not yet running.",
        lambda _, load: f" {load.waiting}",
    ),
    RoutingSeries(
        RUNNING,
        "Requests in the batches of the engines.",
        lambda _, load: f" {load.running}",
    ),
    RoutingSeries(KV_USAGE, "Used share of the KV cache, from 0 to 1.", _kv_usage),
    RoutingSeries(
        "vllm:cache_config_info",
        "Tokens of a block of the KV cache, and blocks of all engines together; always 1.",
        _cache_config,
        ("block_size", "num_gpu_blocks"),
    ),
    RoutingSeries(
        "vllm:lora_requests_info",
        "LoRA adapters of the running and the waiting requests; the value is the time.",
        _loras,
        ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    ),
    RoutingSeries(
        BY_NAME["ready"].full_name,
        BY_NAME["ready"].help,
        lambda now, _: f" {int(now.is_ready)}",
    ),
    RoutingSeries(
        "holdfast_proven_tokens",
        "Longest context that the last probe proved; 0 before the first.",
        lambda now, _: f" {now.proven_tokens}",
    ),
)
"""In the order of the page."""

_HEADS = tuple(
    (f"# HELP {one.name} {one.help}\n# TYPE {one.name} gauge\n{one.name}", one.sample)
    for one in ROUTING_SERIES
)


def routing_page(now: Routing, *, is_openmetrics: bool = False) -> bytes:
    """Write the page as Prometheus text or OpenMetrics, which differ only in the end marker."""
    load = now.load if now.is_ready else now.load.saturated()
    samples = ((head, sample(now, load)) for head, sample in _HEADS)
    lines = [f"{head}{sample}\n" for head, sample in samples if sample]
    return "".join([*lines, OPENMETRICS_END if is_openmetrics else ""]).encode()
