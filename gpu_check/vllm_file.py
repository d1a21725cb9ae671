"""vLLM's `v1/worker/workspace.py` alone: where it is found, and how it is loaded without vLLM.

It is never copied into this repository. It is taken from an installed vLLM, whose package is not
imported for that, or from what the user gives: the file, a folder of vLLM or one of its wheels.
"""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

MEMBER = "v1/worker/workspace.py"
NAME = "vllm.v1.worker.workspace"
FETCH_SECONDS = 900.0
_STUBS: Mapping[str, Mapping[str, Any]] = {
    "vllm": {},
    "vllm.envs": {"VLLM_DEBUG_WORKSPACE": False},
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.utils": {},
    "vllm.utils.math_utils": {"round_up": lambda size, granule: -(-size // granule) * granule},
    "vllm.v1": {},
    "vllm.v1.worker": {},
    "vllm.v1.worker.ubatching": {"dbo_current_ubatch_id": lambda: 0},
}
"""What the file imports of vLLM, and as much of it as the file uses."""


def read(given: Path | None) -> bytes | None:
    """The file's bytes, from `given` or the installed vLLM; None if neither has it."""
    if given is None:
        spec = importlib.util.find_spec("vllm")  # of the top package, which imports nothing
        folders = (spec.submodule_search_locations if spec else None) or ()
        return next(filter(None, (_in_folder(Path(folder)) for folder in folders)), None)
    if given.is_dir():
        return _in_folder(given)
    if zipfile.is_zipfile(given):
        with zipfile.ZipFile(given) as wheel:
            member = f"vllm/{MEMBER}"
            return wheel.read(member) if member in wheel.namelist() else None
    return given.read_bytes() if given.is_file() else None


def fetch(directory: Path, requirement: str) -> Path:
    """A wheel of vLLM in `directory`, by pip and without what it requires; some hundred MB.

    Raises:
        OSError: pip could not fetch it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    found = sorted(directory.glob("vllm-*.whl"))
    if not found:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command = [*pip, "--dest", str(directory), requirement]
        try:
            subprocess.run(command, check=True, timeout=FETCH_SECONDS, stdout=sys.stderr)
        except subprocess.SubprocessError as error:
            raise OSError(f"pip could not download {requirement}") from error
        found = sorted(directory.glob("vllm-*.whl"))
    return found[-1]


def load(path: Path) -> ModuleType:
    """The file as `vllm.v1.worker.workspace`, with stubs for what it imports of vLLM.

    Raises:
        ImportError: it imports something else of vLLM, or vLLM is imported already.
    """
    if "vllm" in sys.modules:
        raise ImportError("vLLM is imported already, so that its file is not alone")
    for name, contents in _STUBS.items():
        _install(name, ModuleType(name), contents)
    spec = importlib.util.spec_from_file_location(NAME, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    _install(NAME, module, {})
    spec.loader.exec_module(module)
    return module


def _install(name: str, module: ModuleType, contents: Mapping[str, Any]) -> None:
    module.__dict__.update(contents)
    module.__path__ = []
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def _in_folder(folder: Path) -> bytes | None:
    paths = (folder / MEMBER, folder / "vllm" / MEMBER)
    return next((path.read_bytes() for path in paths if path.is_file()), None)
