"""A model that was compiled once is not compiled again, and answers the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from servers import SMALL, Server, running

COMPILE_DEADLINE_SECONDS = 420.0
"""Half a minute where nothing else runs, and several beside other engines."""
FLAGS = tuple(flag for flag in SMALL if flag != "--enforce-eager")
PROMPTS = ("hold", "one two three four five six seven", "on and on " * 40)


@pytest.mark.timeout(1200)
def test_the_second_start_takes_what_the_first_has_compiled(tmp_path: Path) -> None:
    """Its worker is forked, that of the first start was not: inductor compiles for both in one way.

    Its configuration is part of the key, and is read from the environment of the process.
    """
    cache = tmp_path / "cache"
    # Learned of no other server, or the first worker would be forked too.
    environment = {"VLLM_CACHE_ROOT": str(cache), "HOLDFAST_LEARNED_DIR": str(tmp_path / "own")}
    said, found = [], []
    for _ in range(2):
        with running(tmp_path, "--demo", *FLAGS, environment=environment) as server:
            server.until_ready(deadline_seconds=COMPILE_DEADLINE_SECONDS)
            said.append(_answers(server))
            found.append(_kept(cache))
            assert server.stop() == 0
    assert len(found[0]) == 1
    assert found[1] == found[0]
    assert said[1] == said[0]


def _answers(server: Server) -> list[list[int]]:
    """Return the tokens of its answers."""
    options = {"max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
    replies = [server.completion(prompt, **options).json() for prompt in PROMPTS]
    return [reply["choices"][0]["token_ids"] for reply in replies]


def _kept(cache: Path) -> dict[str, int]:
    """Return when each compiled model was written."""
    models = cache.glob("torch_compile_cache/torch_aot_compile/*/rank_*/model")
    return {str(path): path.stat().st_mtime_ns for path in models}
