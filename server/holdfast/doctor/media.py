"""What may clients have the server fetch?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from holdfast.doctor.findings import Finding, HazardName, ok, warning
from holdfast.engine.unsupported import is_on

LARGEST_CONFIG_BYTES = 4 * 1024 * 1024

_NAME: HazardName = "media-urls"
_DOMAINS = "--allowed-media-domains"
_OWN_CONNECTOR = "http"


def check_media(arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[Finding]:
    """Every finding about media that a client names by URL."""
    connector = environment.get("VLLM_MEDIA_CONNECTOR", _OWN_CONNECTOR)
    is_listed = any(one.partition("=")[0] == _DOMAINS for one in arguments)
    if connector != _OWN_CONNECTOR:
        yield warning(
            _NAME,
            f"VLLM_MEDIA_CONNECTOR={connector} fetches what clients name, and nothing checks the "
            "addresses.",
            "unset it, or make sure that it connects only to public addresses.",
        )
    if is_on("VLLM_MEDIA_URL_ALLOW_REDIRECTS", environment):
        yield warning(
            _NAME,
            "VLLM_MEDIA_URL_ALLOW_REDIRECTS lets a host redirect the server to another one.",
            "unset it.",
        )
    if arguments and not is_listed and (part := _media_part(Path(arguments[0]))):
        yield warning(
            _NAME,
            f"the model accepts media ({part}), and clients may have the server fetch them from "
            "any public address.",
            f"add {_DOMAINS} with the hosts that serve them.",
        )
    elif is_listed:
        yield ok(_NAME, f"{_DOMAINS} is given")


def _media_part(model: Path) -> str:
    """What of a model directory's configuration is for media; empty if there is none."""
    try:
        with (model / "config.json").open("rb") as file:
            config = json.loads(file.read(LARGEST_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return ""
    names = ("vision_config", "audio_config", "video_config", "thinker_config")
    return next((name for name in names if isinstance(config, dict) and name in config), "")
