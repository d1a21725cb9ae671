"""What was given to this server, for `/statusz`: image, versions, flags, variables; no secrets."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast import __version__
from holdfast.configuration_record import Configuration
from holdfast.hide_keys import MASK, masked
from holdfast.settings import Settings, flags
from holdfast.settings.variable_names import IMAGE_VARIABLE, is_read
from holdfast.settings.yaml_files import with_file
from holdfast.versions import installed_version, vllm_version

_SECRET_WORDS = {"credential", "credentials", "key", "keys", "password", "secret", "token"}
"""By the last word of a name: `--hf-token`, and not `--max-num-batched-tokens`."""
_SECRET_VALUE = re.compile(r"\b(?:hf|sk)[-_][\w-]{16,}")
"""What Hugging Face and OpenAI call a token."""
_USER_OF_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_SECRET_OF_QUERY = re.compile(
    r"(?<=[?&])([\w-]*(?:key|token|secret|password))=[^&\s]+", re.IGNORECASE
)
_MAX_CHARACTERS = 2000
"""The maximum of one value: a chat template may be given as text."""


def given(settings: Settings, environment: Mapping[str, str]) -> Configuration:
    """Return what is known before vLLM is imported.

    Flags are those of the command line and of the `--config` file. A value is masked if it is a
    key of the server, if its name says that it is secret, or if it looks like a token.
    """
    keys = {*settings.listen.api_keys, settings.keys.admin_api_key or ""} - {""}
    secret = {"VLLM_API_KEY", *(flag.variable for flag in flags() if flag.is_secret)}
    return Configuration(
        image=environment.get(IMAGE_VARIABLE, ""),
        versions={
            "holdfast": __version__,
            "vllm": vllm_version(),
            "torch": installed_version("torch"),
            "transformers": installed_version("transformers"),
            "python": platform.python_version(),
        },
        flags=tuple(without_secrets(masked(with_file(settings.vllm_arguments), keys))),
        variables={
            name: MASK if name in secret or _is_secret(name) else _cleaned(value)
            for name, value in sorted(environment.items())
            if (name.startswith("VLLM_") or is_read(name)) and name != IMAGE_VARIABLE
        },
    )


def without_secrets(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the arguments with each secret masked that a name or its own form gives away."""
    is_of_secret = False
    for argument in arguments:
        is_flag = argument.startswith("-")
        name, equals, value = argument.partition("=")
        if is_of_secret and not is_flag:
            yield MASK
            continue
        is_of_secret = is_flag and _is_secret(name)
        if is_flag and equals:
            yield f"{name}={MASK if is_of_secret else _cleaned(value)}"
        else:
            yield _cleaned(argument)


def _is_secret(name: str) -> bool:
    words = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+", name)
    return bool(words) and words[-1].lower() in _SECRET_WORDS


def _cleaned(value: str) -> str:
    """Return the value without passwords and tokens in it, whatever it is a value of."""
    if value.startswith(("{", "[")):
        value = _cleaned_document(value)
    value = _SECRET_VALUE.sub(MASK, _USER_OF_URL.sub(MASK, value))
    value = _SECRET_OF_QUERY.sub(rf"\1={MASK}", value)
    return value if len(value) <= _MAX_CHARACTERS else f"{value[:_MAX_CHARACTERS]}..."


def _cleaned_document(text: str) -> str:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return text
    hidden = _hidden(document)
    return text if hidden == document else json.dumps(hidden)


def _hidden(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: MASK if _is_secret(name) else _hidden(one) for name, one in value.items()}
    return [_hidden(one) for one in value] if isinstance(value, list) else value
