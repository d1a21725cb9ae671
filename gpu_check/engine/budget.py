"""Is a reservation inside of the KV budget, to the byte?"""

from __future__ import annotations

from collections.abc import Sequence

from gpu_check.engine.subjects import Engine
from gpu_check.engine.witness import ADDED_BYTES
from gpu_check.records import CheckFailedError, CheckSkippedError, Measured


def check(engine: Engine) -> Sequence[Measured]:
    """The KV cache was sized twice in the real worker, with a reservation added in between.

    What the peak of a forward pass and the estimate of graphs changed meanwhile is not of the
    reservation, and vLLM says how much that is. Where the GPU shares the host's memory, vLLM sizes
    it by what the whole host has available, which changes by more than the reservation.
    """
    if any(device.is_integrated for device in engine.errand.machine.devices):
        raise CheckSkippedError("the device shares the host's memory, which others take and free")
    sizes = [event.sizes for event in engine.events() if event.name == "sized"][:2]
    if len(sizes) < 2:
        raise CheckFailedError("the KV cache was not sized twice")
    before, after = sizes
    added_bytes = after["workspace_bytes"] - before["workspace_bytes"]
    if added_bytes != ADDED_BYTES:
        raise CheckFailedError(f"{ADDED_BYTES} bytes more were reserved, {added_bytes} came of it")
    peak_bytes = after.get("peak_bytes", 0) - before.get("peak_bytes", 0)
    lost_bytes = before["available_bytes"] - after["available_bytes"] - peak_bytes
    if lost_bytes != added_bytes:
        raise CheckFailedError(
            f"{added_bytes} bytes more were reserved, and the KV cache got {lost_bytes} bytes less;"
            " is something else running on the GPU?"
        )
    return [
        Measured("KV budget before", before["available_bytes"], "bytes"),
        Measured("KV budget after", after["available_bytes"], "bytes"),
        Measured("reserved in between", added_bytes, "bytes"),
        Measured("other change of the peak", peak_bytes, "bytes"),
        Measured("sized by", "profile" if "consumed_bytes" in after else "--kv-cache-memory-bytes"),
    ]
