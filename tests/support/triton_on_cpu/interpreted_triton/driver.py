"""The half of a Triton backend that launches kernels: here it only says that there is a CPU."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from .compiler import refuse
from .fixing import FixedImport

# Triton imports its backends before the interpreter, which is made for the first kernel.
sys.meta_path.insert(0, FixedImport())


class Driver(DriverBase):  # type: ignore[misc]  # Triton is untyped
    """What vLLM looks for before it defines its kernels."""

    @classmethod
    def is_active(cls) -> bool:
        """Whether there is a device for it."""
        return True

    def get_current_target(self) -> Any:
        """The device that kernels are made for."""
        return GPUTarget("cpu", 0, 1)

    def map_python_to_cpp_type(self, *_: Any) -> NoReturn:
        """Asked for a launcher."""
        refuse()

    def get_active_torch_device(self) -> NoReturn:
        """Asked for memory of the device."""
        refuse()

    def get_benchmarker(self) -> NoReturn:
        """Asked for a kernel that is tuned."""
        refuse()
