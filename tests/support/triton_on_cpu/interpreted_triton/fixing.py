"""Fixes Triton's interpreter as it is imported, so that no kernel ever runs without the fixes."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_INTERPRETER = "triton.runtime.interpreter"


class FixedImport(importlib.abc.MetaPathFinder):
    """Finds the interpreter where it is, once, and fixes what is imported."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """That of the interpreter; every other module is left to others."""
        if name != _INTERPRETER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            from . import fixes

            fixes.install()

        loader.exec_module = exec_module
        return spec
