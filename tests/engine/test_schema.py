"""What the served OpenAPI document promises, asked of a real engine."""

from __future__ import annotations

import pytest

from schema_cases import send_cases
from servers import Server

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("demo")]

CASES = 500
LONG_PROMPT_TOKENS = 3000
"""More than one step takes in."""


@pytest.mark.timeout(900)
def test_the_document_keeps_its_promises(demo: Server) -> None:
    """No request ends in a failure of the server or a status that is not documented."""
    tally = send_cases(demo, CASES, start=0)
    print(tally)  # noqa: T201 - what pytest shows of a failure
    assert not tally.wrong
    assert tally.cases >= CASES
    assert tally.reached >= 0.3
    assert demo.metric("engine_deaths_total") == 0


def test_a_seed_repeats_an_answer_to_a_prompt_of_several_steps(demo: Server) -> None:
    """vLLM's own way ends the engine on the CPU, and on a GPU it takes back what it drew."""
    prompt = [20 + index % 97 for index in range(LONG_PROMPT_TOKENS)]
    options = {"seed": 7, "temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    answers = [demo.completion(prompt, **options) for _ in range(2)]
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert texts[0] == texts[1]
    other = demo.completion(prompt, **{**options, "seed": 8})
    assert other.json()["choices"][0]["text"] != texts[0]
