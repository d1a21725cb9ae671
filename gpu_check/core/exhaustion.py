"""What happens when the device cannot hold a growth?"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_check.core.bench import Bench, view
from gpu_check.records import CheckFailedError, Measured
from holdfast.workspace.plan import MIB

_MORE_THAN_ANY_DEVICE_BYTES = 1 << 50


def check(bench: Bench) -> Sequence[Measured]:
    """It is refused as out of memory, and the old buffer has its place and its content."""
    manager = bench.manager("alongside", limit_bytes=2 * _MORE_THAN_ANY_DEVICE_BYTES)
    before = view(manager, MIB)
    before.fill_(7)
    manager.seal()
    manager.lock()
    text = ""
    try:
        view(manager, _MORE_THAN_ANY_DEVICE_BYTES)
    except AssertionError as error:
        text = str(error)
    if "out of memory" not in text:
        raise CheckFailedError(f"2^50 bytes were asked for, and the answer was {text!r}")
    after = view(manager, MIB)
    if after.data_ptr() != before.data_ptr() or not torch.all(after == 7):
        raise CheckFailedError("a growth that failed cost the buffer that was there")
    if manager.accounting.rejections["scratch"] != 1:
        raise CheckFailedError(f"refusals are counted as {manager.accounting.rejections}")
    return [Measured("refusal", text.partition("\n")[0][:300])]
