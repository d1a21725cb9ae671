"""The chart, rendered once for all tests of a process."""

from __future__ import annotations

import pytest

from ops.charts import Answer, render


@pytest.fixture(scope="session")
def answer() -> Answer:
    """What real Helm makes of every case."""
    return render()
