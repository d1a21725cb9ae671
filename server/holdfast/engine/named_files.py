"""What the command line names is read before an engine starts, which may take minutes to find out.

Only what lies on this machine is looked at, and only what would end every start in the same way.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import _compile_jinja_template
from vllm.exceptions import VLLMError
from vllm.renderers.chat_utils import load_chat_template
from vllm.tokenizers import cached_tokenizer_from_config

from holdfast.engine import weight_files
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


def check(namespace: argparse.Namespace, model_config: Any) -> None:
    """Read the LoRA adapters, the headers of the weights and the tokenizer.

    Raises:
        UsageError: one of them is not there, or is not what it should be.
    """
    for module in namespace.lora_modules or ():
        _check_adapter(module.name, module.path)
    weight_files.check(Path(model_config.model), str(namespace.load_format))
    _check_tokenizer(model_config)


def check_template(given: str | None) -> None:
    """Read a chat template, a file or the template itself.

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
    if not is_path:  # of the Hub, or of a resolver
        return
    if not (directory / "adapter_config.json").is_file():
        raise UsageError(
            f"--lora-modules: {name}: {directory} is not an adapter: it has no "
            "adapter_config.json.",
            remedy="name the directory of an adapter, or leave it out.",
        )
    weight_files.check(directory, "safetensors")


def _check_tokenizer(model_config: Any) -> None:
    """Load it as vLLM will, which keeps what was loaded."""
    try:
        cached_tokenizer_from_config(model_config)
    except Exception as error:  # that of the library in Rust is an Exception, and no subclass
        named = _wrong_tokenizer(Path(model_config.tokenizer))
        raise UsageError(
            named or f"cannot load the tokenizer of {model_config.tokenizer}: {_said(error)}",
            remedy="put the tokenizer's files beside the model, or name another one with "
            "--tokenizer.",
        ) from error


def _wrong_tokenizer(directory: Path) -> str:
    """Which file of a tokenizer on this machine is wrong, and how; empty if that is not plain."""
    if not directory.is_dir():
        return ""
    found = [path for name in _TOKENIZERS if (path := directory / name).is_file()]
    if not found:
        return f"there is no tokenizer in {directory}: it has none of {', '.join(_TOKENIZERS)}."
    return next(filter(None, map(_wrong_file, (*found, *_described(directory)))), "")


def _described(directory: Path) -> Iterable[Path]:
    return (p for p in (directory / "tokenizer_config.json",) if p.is_file())


def _wrong_file(path: Path) -> str:
    if weight_files.is_pointer(path):
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


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_EXCERPT_CHARACTERS]
