"""Phrases that a native engineer writes nowhere."""

from __future__ import annotations

import re

FOREIGN = re.compile(
    r"(?<!there )\bis no (?!longer)|\bworth to\b|\bso (?:long|many|much) as\b"
    r"|\b(?:for|in|only|has|lasts?|after) so long\b|\bbut for\b|\banew\b|\bmend(?:s|ed|ing)?\b"
    r"|\bof which\b|\bsomebody\b|\bwho(?:m)?ever\b|\bfor ever\b|\b(?:is|are) answered \d{3}\b",
    re.IGNORECASE,
)
"""CONTRIBUTING has what to write instead."""


def slips(text: str) -> list[str]:
    """Each such phrase with a few words around it."""
    return [text[max(0, slip.start() - 40) : slip.end() + 20] for slip in FOREIGN.finditer(text)]
