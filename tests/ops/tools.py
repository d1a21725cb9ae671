"""Where `make ops-tools` has put what these tests run."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PLACE = ROOT / ".ops-tools"
_INSTALL = "make ops-tools installs it"


def tool(name: str) -> str:
    """The path of a tool; skips the test with the reason where it is absent."""
    for place in (PLACE / "bin", PLACE / "venv" / "bin"):
        if (place / name).exists():
            return str(place / name)
    pytest.skip(f"{name} is not here: {_INSTALL}")


def tool_python() -> str:
    """The interpreter that has the tools which are Python packages."""
    return tool("python")
