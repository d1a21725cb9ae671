"""The record of what may make one server answer otherwise than another.

`configuration` and `engine.model.identity` fill it, `/statusz` shows it, and `verify` compares two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file of the model that is served."""

    name: str
    size_bytes: int
    sha256: str = ""
    """Empty if nobody has read the whole file."""
    hashed_by: Literal["holdfast", "hub", ""] = ""
    """What read it: Holdfast at this start, or the Hub when it was uploaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Everything that may make one server answer otherwise than another; no secrets."""

    image: str = ""
    """The name of the container image; empty if nobody told it."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """By the name of the package: Holdfast, vLLM, torch, transformers, and Python."""
    flags: tuple[str, ...] = ()
    """As given, by the command line and the `--config` file."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """The variables of Holdfast and vLLM."""
    fingerprint: str = ""
    """The fingerprint of `records.EngineFacts`; empty until vLLM is imported."""
    devices: tuple[str, ...] = ()
    """The name of the device of each rank; empty until an engine has started, as all below."""
    driver: str = ""
    """The version of the GPUs' driver; empty on the CPU."""
    max_num_batched_tokens: int = 0
    """The most tokens of an engine step, as given or by vLLM's default; 0 until it is known."""
    max_num_seqs: int = 0
    """The most sequences of a step, in the same way."""
    model: str = ""
    """A directory, or a name of the Hub."""
    revision: str = ""
    """The Hub's commit, if the model came from there."""
    files: tuple[ModelFile, ...] = ()
