"""Ten thousand requests made from the served OpenAPI document, different ones in each run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from schema_cases import send_cases
from servers import SMALL, running

ADMIN_KEY = "of-an-operator"
CASES = 10_000
CASES_A_ROUND = 1000
"""The cases of one round, which its printed start value repeats."""


@pytest.mark.timeout(3 * 3600)
def test_the_document_keeps_its_promises(tmp_path: Path) -> None:
    """No request ends in a failure of the server or a status that is not documented."""
    tools = ("--enable-auto-tool-choice", "--tool-call-parser=hermes")
    flags = (*SMALL, *tools, "--probe=quick", f"--admin-api-key={ADMIN_KEY}")
    with running(tmp_path, "--demo", *flags) as server:
        server.until_ready()
        done = 0
        while done < CASES:
            start = random.randrange(2**32)
            tally = send_cases(server, CASES_A_ROUND, start, admin_key=ADMIN_KEY)
            print(f"start {start}: {tally}", flush=True)
            assert not tally.wrong
            assert tally.reached >= 0.3
            done += tally.cases
        assert server.metric("engine_deaths_total") == 0
