"""The half of a Triton backend that compiles kernels: here there is nothing to compile for."""

from __future__ import annotations

from typing import Any, NoReturn

from triton.backends.compiler import BaseBackend


def refuse() -> NoReturn:
    """Say that only the interpreter runs kernels here."""
    raise NotImplementedError("kernels are interpreted on the CPU: set TRITON_INTERPRET=1")


class Compiler(BaseBackend):  # type: ignore[misc]  # Triton is untyped
    """What Triton looks for in every backend."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        """Whether `target` is the driver's."""
        return bool(target.backend == "cpu")

    def hash(self) -> NoReturn:
        """Asked for what a compiled kernel is kept under."""
        refuse()

    def parse_options(self, *_: Any) -> NoReturn:
        """Asked for a kernel that is to be compiled."""
        refuse()

    def add_stages(self, *_: Any) -> NoReturn:
        """Asked how."""
        refuse()

    def load_dialects(self, *_: Any) -> NoReturn:
        """Asked for what the compiler knows."""
        refuse()

    def get_module_map(self) -> NoReturn:
        """Asked for what kernels may import."""
        refuse()
