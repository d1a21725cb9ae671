"""How much the counters of the front end hold."""

from __future__ import annotations

from holdfast.telemetry.counters import EngineDeaths, Recycles, Refusals


def counter_values(counts: Refusals | EngineDeaths | Recycles) -> dict[str, int]:
    """By reason or cause."""
    (family,) = counts.counter.collect()
    return {
        word: int(sample.value)
        for sample in family.samples
        if sample.name.endswith("_total")
        for word in sample.labels.values()
    }
