"""What is not here, and which checks are skipped for it."""

from __future__ import annotations

from collections.abc import Mapping

from gpu_check.checks import SUBJECTS, Check, Need
from gpu_check.records import Lack, Machine


def lacks(machine: Machine, *, has_workspace_file: bool) -> Mapping[Need, Lack]:
    """What this machine lacks, by the need that it leaves open."""
    if not machine.torch:  # without which nothing else is known
        what = f"torch cannot be imported by {machine.python} of Python"
        remedy = "choose another: make gpu-check PYTHON=/path/to/python3"
        slow = 'on a slow machine, give it more time: ARGS="--patience 3"'
        return {"torch": Lack(what, f"{remedy}; or, {slow}")}
    found: dict[Need, Lack] = {}
    if not machine.devices:
        found["cuda"] = Lack("torch sees no CUDA device", _remedy_of_no_device(machine))
    if len(machine.devices) < 2:
        found["two_devices"] = Lack(
            f"torch sees {len(machine.devices)} CUDA devices, and two are needed",
            "run it on a machine with two GPUs of one kind",
        )
    if not has_workspace_file:
        found["workspace_file"] = Lack(
            "vLLM's file v1/worker/workspace.py is not here",
            'say where it is (wheel, folder or file): ARGS="--vllm PATH"; or ARGS=--fetch-vllm',
        )
    if lack := _lack_of_engine(machine):
        found["engine"] = lack
    return found


def lack_of(check: Check, found: Mapping[Need, Lack]) -> Lack | None:
    """The first of what is lacking that `check` needs."""
    of_subject = next(subject.needs for subject in SUBJECTS if subject.name == check.subject)
    needs = (*of_subject, *check.needs)
    return next((found[need] for need in needs if need in found), None)


def _remedy_of_no_device(machine: Machine) -> str:
    if not machine.cuda:
        return "install a build of torch for CUDA"
    return "see what `nvidia-smi` and `python -c 'import torch; torch.cuda.init()'` say"


def _lack_of_engine(machine: Machine) -> Lack | None:
    if not machine.vllm:
        return Lack("vLLM is not installed", "pip install '.[cuda]' 'vllm==0.32.*'")
    if machine.missing_requirements:
        names = ", ".join(machine.missing_requirements)
        return Lack(f"Holdfast requires what is not installed: {names}", "pip install .")
    if machine.is_vllm_for_cpu and machine.devices:
        # pip would take the build for CPUs for one that satisfies the requirement.
        remedy = "pip install --force-reinstall '.[cuda]' 'vllm==0.32.*'"
        return Lack("vLLM is its build for CPUs beside a GPU", remedy)
    if not machine.is_vllm_for_cpu and not machine.devices:
        return Lack("vLLM is its build for GPUs, and there is no CUDA device", "use its CPU build")
    return None


_NAMES: Mapping[Need, str] = {"cuda": "a GPU", "two_devices": "two GPUs", "engine": "vLLM"}


def named_needs(check: Check) -> str:
    """What `check` needs beside torch and the one file of vLLM, for people."""
    of_subject = next(subject.needs for subject in SUBJECTS if subject.name == check.subject)
    return ", ".join(_NAMES[need] for need in (*of_subject, *check.needs) if need in _NAMES)
