"""Checks the files that the command line names: template, adapters, tokenizer and weights.

An engine may take minutes to find out that one of them is unusable. Only local files are checked,
and only for faults that would end every start in the same way. Adapters of the Hub are downloaded.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from transformers.utils.chat_template_utils import _compile_jinja_template
from vllm import envs
from vllm.exceptions import VLLMError
from vllm.renderers.chat_utils import load_chat_template
from vllm.tokenizers import cached_tokenizer_from_config

from holdfast.errors import UsageError

_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)
_EXCERPT_CHARACTERS = 300
_SAFETENSORS_FORMATS = {"auto", "hf", "mistral", "safetensors", "fastsafetensors", "instanttensor"}
_CONSOLIDATED = "consolidated*.safetensors"
"""If such files exist, vLLM loads the model from them by default."""
_POINTER = b"version https://git-lfs"
_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, in this many bytes."""
_MAX_HEADER_BYTES = 100_000_000
"""The library rejects a larger header."""


def check(namespace: argparse.Namespace, model_config: Any) -> None:
    """Read the LoRA adapters, the headers of the weights and the tokenizer.

    Raises:
        UsageError: one of them is missing, or is not what it should be.
        OSError: an adapter cannot be downloaded.
    """
    for module in namespace.lora_modules or ():
        _check_adapter(module.name, module.path)
    check_weights(Path(model_config.model), str(namespace.load_format))
    _check_tokenizer(model_config)


def check_template(given: str | None) -> None:
    """Read a chat template, given as a file or as the template itself.

    Raises:
        UsageError: the file does not exist, or it is not a template.
    """
    if given is None:
        return
    try:
        _compile_jinja_template(load_chat_template(given))
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(
            f"--chat-template: line {error.lineno}: {error.message}", remedy="correct the template."
        ) from error
    except (OSError, ValueError, VLLMError) as error:
        raise UsageError(
            f"--chat-template: {given} cannot be read.",
            remedy="name an existing file, or give the template itself.",
        ) from error


def _check_adapter(name: str, given: str) -> None:
    directory = Path(given).expanduser()
    is_path = given.startswith(("/", "./", "../", "~")) or directory.exists()
    if not is_path:
        _download_adapter(name, given)
        return
    if not (directory / "adapter_config.json").is_file():
        raise UsageError(
            f"--lora-modules: {name}: {directory} is not an adapter: it has no "
            "adapter_config.json.",
            remedy="name the directory of an adapter, or leave it out.",
        )
    check_weights(directory, "safetensors")


def _download_adapter(name: str, given: str) -> None:
    """Have the cache of the Hugging Face Hub hold an adapter.

    vLLM itself only logs why it cannot be downloaded, and then finds no file of it.
    """
    if envs.VLLM_USE_MODELSCOPE:
        return
    try:
        snapshot_download(given)
    except HFValidationError:
        return  # not a name of the Hub: vLLM says that there is no such adapter
    except OSError as error:
        raise OSError(f"--lora-modules: {name}: {error}") from error


def _check_tokenizer(model_config: Any) -> None:
    """Load the tokenizer as vLLM will, which caches it."""
    try:
        cached_tokenizer_from_config(model_config)
    except Exception as error:  # the Rust library raises a plain Exception
        named = _wrong_tokenizer(Path(model_config.tokenizer))
        raise UsageError(
            named or f"cannot load the tokenizer of {model_config.tokenizer}: {_message(error)}",
            remedy="put the tokenizer's files beside the model, or name another one with "
            "--tokenizer.",
        ) from error


def _wrong_tokenizer(directory: Path) -> str:
    """Return which file of a local tokenizer is wrong, and how; empty if none clearly is."""
    if not directory.is_dir():
        return ""
    found = [path for name in _TOKENIZERS if (path := directory / name).is_file()]
    if not found:
        return f"there is no tokenizer in {directory}: it has none of {', '.join(_TOKENIZERS)}."
    if (settings := directory / "tokenizer_config.json").is_file():
        found.append(settings)
    return next(filter(None, map(_wrong_file, found)), "")


def _wrong_file(path: Path) -> str:
    if _is_pointer(path):
        return f"{path} is a git-lfs pointer, not a tokenizer."
    if path.suffix != ".json":
        return ""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return f"{path} is not JSON, or cannot be read."
    if path.name == "tokenizer.json" and not (isinstance(content, dict) and "model" in content):
        return f"{path} is not a tokenizer: it has no `model`."
    return ""


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_EXCERPT_CHARACTERS]


def check_weights(directory: Path, load_format: str) -> None:
    """Check that the weights in a directory are complete: their headers say how large they must be.

    Only files that vLLM will read are checked (`DefaultModelLoader._prepare_weights`, 0.32): others
    of the same model may lie beside them incomplete. A missing directory and weights in another
    format are skipped.

    Raises:
        UsageError: one is a git-lfs pointer, is truncated, or is missing.
    """
    if load_format not in _SAFETENSORS_FORMATS:
        return
    is_consolidated = load_format == "mistral" or (
        load_format == "auto" and any(directory.glob(_CONSOLIDATED))
    )
    kind = "consolidated" if is_consolidated else "model"
    found = sorted(directory.glob(_CONSOLIDATED if is_consolidated else "*.safetensors"))
    for path in _named(directory / f"{kind}.safetensors.index.json", found):
        _check_whole(path)
    if not found:
        for path in sorted(directory.glob("*.bin")):
            _refuse_pointer(path)


def _is_pointer(path: Path) -> bool:
    """Whether it is a pointer that git-lfs left in place of the real file."""
    try:
        with path.open("rb") as file:
            return file.read(len(_POINTER)) == _POINTER
    except OSError:
        return False


def _named(index: Path, found: list[Path]) -> list[Path]:
    """Return the files that the index names, all of which must exist; without an index, all."""
    try:
        named = list(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return found
    if not found:
        return []
    names = {name for name in named if isinstance(name, str)}
    if not all(isinstance(name, str) for name in named):
        raise UsageError(
            f"{index} does not name files as the places of the weights.",
            remedy="download this file, or the whole model, again.",
        )
    missing = sorted(names - {path.name for path in found})
    if missing:
        raise UsageError(
            f"{index.parent / missing[0]} is missing, but {index.name} names it.",
            remedy="download the missing file, or the whole model again.",
        )
    return [path for path in found if path.name in names]


def _refuse_pointer(path: Path) -> None:
    if _is_pointer(path):
        raise UsageError(
            f"{path} is a git-lfs pointer, not weights.",
            remedy="run `git lfs pull` in its directory.",
        )


def _check_whole(path: Path) -> None:
    """Compare the size of a safetensors file with what its header says.

    https://github.com/huggingface/safetensors#format
    """
    _refuse_pointer(path)
    try:
        wanted_bytes = _wanted_bytes(path)
        found_bytes = path.stat().st_size
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}.", remedy="give this user read access to it."
        ) from error
    if wanted_bytes is None:
        raise UsageError(f"{path} is not a safetensors file.", remedy="download it again.")
    if found_bytes != wanted_bytes:
        raise UsageError(
            f"{path} has {found_bytes} bytes, but its header describes {wanted_bytes}.",
            remedy="download it again.",
        )


def _wanted_bytes(path: Path) -> int | None:
    """Return the size that a safetensors header implies; None without a header."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 0 < header_bytes <= _MAX_HEADER_BYTES:
            return None
        header = file.read(header_bytes)
    if len(header) < header_bytes:
        return _LENGTH_BYTES + header_bytes
    try:
        tensors = {k: v for k, v in json.loads(header).items() if k != "__metadata__"}
        data_bytes = max((int(t["data_offsets"][1]) for t in tensors.values()), default=0)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    return _LENGTH_BYTES + header_bytes + data_bytes
