"""What has to be equal on all nodes of one engine, found without importing vLLM or torch.

Nothing in vLLM compares the nodes. With different versions they wait for each other in a collective
until a timeout, or fail to unpickle what the other sends; with different weights they answer
nonsense.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from holdfast import __version__
from holdfast.errors import UsageError
from holdfast.nodes.messages import NodeFacts
from holdfast.versions import installed_version, vllm_version

DRIVER_VERSION = Path("/proc/driver/nvidia/version")
_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
FACT_NAMES = {
    "holdfast_version": "Holdfast",
    "holdfast_digest": "the code of Holdfast",
    "vllm_version": "vLLM",
    "torch_version": "torch",
    "driver_version": "the NVIDIA driver",
    "nccl_version": "NCCL",
    "plugins": "VLLM_PLUGINS",
    "model_digest": "the model",
}
"""What people call each field of `NodeFacts`, in its order."""
_DIGESTS = frozenset({"holdfast_digest", "model_digest"})
"""They say nothing to people."""
_REMEDIES = {
    "holdfast_digest": "install the same build on every node.",
    "plugins": "set the same VLLM_PLUGINS on every node.",
    "model_digest": "copy the same files of the model to every node.",
}


def node_facts(model: str, driver_version: Path = DRIVER_VERSION) -> NodeFacts:
    """Return what this node has, for the model at that path; empty if each node gets its own.

    Raises:
        UsageError: the model cannot be read.
    """
    return NodeFacts(
        holdfast_version=__version__,
        holdfast_digest=_code_digest(),
        vllm_version=vllm_version(),
        torch_version=installed_version("torch"),
        driver_version=_driver_version(driver_version),
        nccl_version=installed_version("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
        plugins=os.environ.get("VLLM_PLUGINS", "all"),
        model_digest=model_digest(model),
    )


def difference(head: NodeFacts, follower: NodeFacts, node: str) -> str:
    """Return one line, with its remedy, about the first fact that differs; empty if none does."""
    found = differences(head, follower, node)
    return next((f"{seen} Remedy: {remedy}" for seen, remedy in found), "")


def differences(head: NodeFacts, follower: NodeFacts, node: str) -> Iterator[tuple[str, str]]:
    """Yield what differs, each with its remedy."""
    for name, known_as in FACT_NAMES.items():
        here, there = getattr(head, name), getattr(follower, name)
        if here == there:
            continue
        if name in _DIGESTS:
            seen = f"{known_as} differs between the head and node {node}."
        else:
            seen = (
                f"{known_as} is {here or 'missing'} on the head and {there or 'missing'} on node "
                f"{node}."
            )
        yield seen, _REMEDIES.get(name, "install the same version on every node.")


def model_digest(model: str) -> str:
    """Return a digest of the model's configuration and index, and of the sizes of its weights.

    A model is a directory or a single file; without one, the digest is empty. The weights
    themselves are not read: that takes minutes.

    Raises:
        UsageError: it cannot be read.
    """
    if not model:
        return ""
    place, digest = Path(model), hashlib.sha256()
    try:
        if not place.is_dir():
            _add(digest, place.name, str(place.stat().st_size).encode())
            return digest.hexdigest()
        for path in sorted(place.iterdir()):
            if path.name == "config.json" or path.name.endswith(".index.json"):
                _add(digest, path.name, path.read_bytes())
            elif path.suffix in _WEIGHTS:
                _add(digest, path.name, str(path.stat().st_size).encode())
    except OSError as error:
        raise UsageError(
            f"the model at {place} cannot be read: {error.strerror}.",
            remedy="copy the model to the same path on every node.",
        ) from error
    return digest.hexdigest()


@cache
def _code_digest() -> str:
    """Return a digest of this package's code, as it was when it was first asked for."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        _add(digest, str(path.relative_to(root)), path.read_bytes())
    return digest.hexdigest()


def _add(digest: hashlib._Hash, name: str, content: bytes) -> None:
    for part in (os.fsencode(name), content):
        digest.update(len(part).to_bytes(8, "big") + part)


def _driver_version(path: Path) -> str:
    with suppress(OSError):
        found = re.search(r"NVRM version:.*?\b(\d+(?:\.\d+)+)\b", path.read_text(errors="replace"))
        return found[1] if found else ""
    return ""
