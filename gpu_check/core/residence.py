"""Does a reservation take its bytes of the device at once, and no others?"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_check.core.bench import Bench, reservation
from gpu_check.records import CheckFailedError, Measured
from holdfast.workspace.plan import MIB

_SIZE_MIB = 64
_ATTEMPTS = 3
"""Others may take or free memory of the device just then."""


def check(bench: Bench) -> Sequence[Measured]:
    """By torch's own count, and by what the driver says is free, except in the host's memory."""
    size_bytes = _SIZE_MIB * MIB
    is_integrated = torch.cuda.get_device_properties(bench.device).is_integrated
    for _ in range(_ATTEMPTS):
        allocated_bytes, taken_bytes = _reserved(bench)
        if allocated_bytes != size_bytes:
            raise CheckFailedError(f"{size_bytes} bytes were reserved, {allocated_bytes} allocated")
        if is_integrated or taken_bytes == size_bytes:
            return [
                Measured("reserved", size_bytes, "bytes"),
                Measured("allocated by torch", allocated_bytes, "bytes"),
                Measured("taken of the device", taken_bytes, "bytes"),
            ]
    raise CheckFailedError(
        f"{size_bytes} bytes were reserved, and {taken_bytes} fewer are free on the device; "
        "is something else running on it?"
    )


def _reserved(bench: Bench) -> tuple[int, int]:
    """What a reservation took by torch's count and by the driver's."""
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    allocated_bytes, (free_bytes, _) = bench.allocated_bytes(), torch.cuda.mem_get_info()
    manager = bench.manager("deny")
    manager.reserve([reservation((0, 0), _SIZE_MIB)])
    taken_bytes = free_bytes - torch.cuda.mem_get_info()[0]
    return bench.allocated_bytes() - allocated_bytes, int(taken_bytes)
