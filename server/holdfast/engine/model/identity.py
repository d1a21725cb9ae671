"""What the engine runs on, and which files its model is: cheap to find out, and never by a guess.

The weights are not read: hundreds of gigabytes would take minutes. What the Hub stores in large
files it names by their SHA-256, which the cache keeps as the target of a link; see
https://huggingface.co/docs/huggingface_hub/guides/manage-cache.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import platform
import re
import stat
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from vllm.platforms import current_platform

from holdfast.configuration_record import Configuration, ModelFile
from holdfast.engine.model.facts import local_ranks

logger = logging.getLogger(__name__)

_SUFFIXES = {
    *(".bin", ".gguf", ".pt", ".pth", ".safetensors"),
    *(".jinja", ".json", ".model", ".py", ".tiktoken", ".txt"),
}
_CONFIGURATIONS = ("config.json", "params.json", "adapter_config.json")
"""One of these is in every model of the Hub; the second is Mistral's, the last one an adapter's."""
_SNAPSHOT = re.compile(r"/models--[^/]+/snapshots/([0-9a-f]{40})$")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_FILE_BYTES = 64 * 1024 * 1024
_MAX_TOTAL_BYTES = 256 * 1024 * 1024
_MAX_FILES = 2000
_NVIDIA = "proc/driver/nvidia/version"
_AMD = "sys/module/amdgpu/version"


class _Look:
    """The paths, sizes and times of files at the last look."""

    def __init__(self) -> None:
        self._seen: list[tuple[Path, int, int]] | None = None

    def has_changed(self, place: Path | None) -> bool:
        """Return whether the files differ from the last look; OSError keeps that one."""
        files = () if place is None else islice(_regular_files(place), _MAX_FILES)
        now = [(path, status.st_size, status.st_mtime_ns) for path, status in files]
        before, self._seen = self._seen, now
        return before not in (None, now)


class ModelFiles:
    """The files of the model of a VllmConfig, as far as that shows without reading them."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._look = _Look()
        # The end of the loop would wait for its own threads, even on a file system that hangs.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="changed files")

    async def have_changed(self) -> bool:
        """Return whether paths, sizes or times differ from the last look; waits for the disk.

        The first look has nothing to compare, nor has one at files that cannot be listed.
        """
        return await asyncio.get_running_loop().run_in_executor(self._reader, self._look_again)

    def _look_again(self) -> bool:
        model = self._config.model_config
        try:
            place = directory_of(model.model, model.revision, self._config.load_config.download_dir)
            has_changed = self._look.has_changed(place)
        except OSError:
            return False
        if has_changed:
            logger.warning("the model's files have changed: no stream of the last engine goes on")
        return has_changed


class AdapterFiles:
    """The files of LoRA adapters, as far as that shows without reading them."""

    def __init__(self) -> None:
        self._looks: dict[int, _Look] = {}
        # As for the files of a model. One that hangs does not hold up the other adapters.
        self._reader = ThreadPoolExecutor(thread_name_prefix="changed adapters")

    async def have_changed(self, lora_id: int, path: str) -> bool:
        """Return whether an adapter's files differ from the last look; see `ModelFiles`.

        `path` may be what vLLM accepts: a directory, one below `~`, or a name of the Hub
        (`get_adapter_absolute_path`, 0.32).
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._reader, self._look_again, lora_id, path
        )

    def _look_again(self, lora_id: int, path: str) -> bool:
        look = self._looks.setdefault(lora_id, _Look())
        try:
            place = directory_of(os.path.expanduser(path), None, None)  # noqa: PTH111 - as vLLM
            return look.has_changed(place)
        except OSError:
            return False

    def forget_all_but(self, lora_ids: Collection[int]) -> None:
        """Forget the files of all adapters but these: vLLM gives no ID to two of them."""
        self._looks = {one: look for one, look in self._looks.items() if one in lora_ids}


def identified(configuration: Configuration, config: Any) -> Configuration:
    """Return the configuration with devices, driver, limits and model, read from a VllmConfig.

    It reads at most 256 MiB of small files, so it is not for the event loop.
    """
    name, revision = config.model_config.model, config.model_config.revision
    directory = directory_of(name, revision, config.load_config.download_dir)
    return replace(
        configuration,
        devices=tuple(map(_device, range(local_ranks(config)))),
        driver="" if current_platform.is_cpu() else driver_version(),
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        model=str(name),
        revision=commit_of(name, directory),
        files=model_files(directory) if directory is not None else (),
    )


def model_files(place: Path) -> tuple[ModelFile, ...]:
    """List the files of a model, which is a directory or a single file, by their names.

    Files up to 64 MiB are read, others have the hash that the Hub's cache knows, or none. What
    cannot be read is left out.
    """
    left_bytes, found = _MAX_TOTAL_BYTES, list[ModelFile]()
    for path, status in islice(_regular_files(place), _MAX_FILES):
        is_read = status.st_size <= min(_MAX_FILE_BYTES, left_bytes)
        try:
            digest = _read_digest(path) if is_read else _digest_of_hub(path)
        except OSError:
            continue
        left_bytes -= status.st_size if is_read else 0
        file = ModelFile(path.name, status.st_size, digest, "hub" if digest else "")
        found.append(replace(file, hashed_by="holdfast") if is_read else file)
    return tuple(found)


def driver_version(root: Path = Path("/")) -> str:
    """Return the version of the kernel's driver of NVIDIA's or AMD's GPUs; empty without one."""
    for name in (_NVIDIA, _AMD):
        try:
            lines = (root / name).read_text().splitlines()
        except OSError:
            continue
        versions = re.findall(r"\b\d+(?:\.\d+)+\b", lines[0] if lines else "")
        return str(versions[0]) if versions else ""
    return ""


def directory_of(model: str, revision: str | None, download_directory: str | None) -> Path | None:
    """Return where the model's files are; None if it is neither here nor in the Hub's cache."""
    if (path := Path(model)).exists():
        return path
    return next(_snapshots(model, revision, download_directory), None)


def commit_of(model: str, directory: Path | None) -> str:
    """Return the commit of a model in the Hub's cache; empty for a path, or if there is none."""
    return "" if directory is None or Path(model).exists() else directory.name


def commit_of_snapshot(path: str) -> str:
    """Return the commit of the directory that the Hub's cache has for it; empty for any other."""
    found = _SNAPSHOT.search(path)
    return found[1] if found else ""


def _snapshots(model: str, revision: str | None, download_directory: str | None) -> Iterator[Path]:
    # vLLM loads the commit that it resolved once (0.32), wherever the branch has moved since.
    revision = getattr(revision, "resolved", revision)
    for cache in (download_directory, None):
        for name in _CONFIGURATIONS:
            try:
                found = try_to_load_from_cache(model, name, cache_dir=cache, revision=revision)
            except ValueError:  # not a name of the Hub: an address, for example
                return
            if isinstance(found, str):
                yield Path(found).parent


def _regular_files(place: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Return the files of a model with a name that matters, in order; others are left out."""
    for path in sorted(place.iterdir()) if place.is_dir() else [place]:
        if path.suffix not in _SUFFIXES:
            continue
        with suppress(OSError):
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                yield path, status


def _device(index: int) -> str:
    if current_platform.is_cpu():
        return _processor()
    return str(current_platform.get_device_name(index))


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    named = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return named[1] if named else platform.machine()


def _read_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of_hub(path: Path) -> str:
    """Return the name of the blob that a file of a snapshot links to, if it is a SHA-256."""
    if not path.is_symlink():
        return ""
    name = path.readlink().name
    return name if _SHA256.fullmatch(name) else ""
