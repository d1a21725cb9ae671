"""A baseline of a small server, recorded as `holdfast verify --record` does."""

from __future__ import annotations

from typing import Any

from holdfast.verify.baseline import Baseline, FirstToken, RecordedSequence, Top
from servers import SMALL, Server

PROMPT = [72, 101, 108, 108, 111, 44, 32] * 20
CANARY = PROMPT[:11]
FLAGS = (
    *SMALL,
    "--dtype=float32",
    "--probe=quick",
    "--max-model-len=512",
    "--max-num-batched-tokens=64",
)
"""The prompt is computed in three chunks."""


def choice(server: Server, prompt: list[int], tokens: int, **options: Any) -> Any:
    """A greedy completion, asked as `holdfast verify --record` does."""
    answer = server.completion(
        prompt,
        max_tokens=tokens,
        ignore_eos=True,
        logprobs=8,
        return_token_ids=True,
        return_tokens_as_token_ids=True,
        cache_salt=f"{len(prompt)}",
        **options,
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def recorded(server: Server) -> Baseline:
    """What a server says of one sequence, and of one first token."""
    answer = choice(server, PROMPT, 8)["token_ids"]
    scored = choice(server, PROMPT + answer, 1, prompt_logprobs=8)["prompt_logprobs"]
    tops: list[Top] = [
        tuple((int(token), told["logprob"]) for token, told in entry.items())
        for entry in scored[1:]
    ]
    first = choice(server, CANARY, 1)["logprobs"]["top_logprobs"][0]
    sample = tuple((int(name.removeprefix("token_id:")), value) for name, value in first.items())
    return Baseline(
        sequences=(RecordedSequence(tuple(PROMPT), tuple(answer), tuple(tops)),),
        first_tokens=(FirstToken(tuple(CANARY), (sample,)),),
    )
