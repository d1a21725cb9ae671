"""How many may use the engine at once, and how many of them one key?

Counted in requests before vLLM's application, and in sequences before its engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from holdfast.records import EngineFacts

SPARE_SHARE = 8
"""One place in so many is beyond what the engine runs at once: when a request ends, the next is
there already, and no step goes by with a gap."""
LEAST_SPARE = 2
KEPT_SHARE = 8
"""Of what runs at once, one in so many at most is kept for keys that have nothing there."""
STEPS_ALONE = 4
"""Steps that the engine has to read of a key while nobody else asks: it never runs out of them."""


def running_at_once(config: Any) -> int:
    """How many sequences an engine of vLLM's configuration runs at once."""
    return _running(config.scheduler_config.max_num_seqs, config.parallel_config.data_parallel_size)


def _running(max_num_seqs: int, data_parallel_size: int) -> int:
    """All replicas together."""
    return max_num_seqs * data_parallel_size


@dataclass(frozen=True, slots=True)
class Places:
    """The places of one engine: without limit while none is known."""

    running: float = math.inf
    """What the engine runs at once."""
    count: float = math.inf
    """Those, and a few more, so that the next is there when one ends."""
    step_tokens: float = math.inf
    """Tokens of prompts that the engine works through in one step."""

    @classmethod
    def of(cls, facts: EngineFacts | None) -> Places:
        """Those of an engine; vLLM's own bound (`--max-num-queued-reqs`) is never met before."""
        if facts is None:
            return cls()
        running = _running(facts.max_num_seqs, facts.data_parallel_size)
        wanted = running + max(LEAST_SPARE, running // SPARE_SHARE)
        bound = facts.max_queued_requests
        return cls(
            running,
            wanted if bound is None else max(1, min(wanted, bound)),
            facts.max_num_batched_tokens * facts.data_parallel_size,
        )

    def has_one(self, *, taken: int, by_key: int, keys_inside: int, keys: int) -> bool:
        """Whether a key that has `by_key` of the `taken` ones may have another.

        While some of the `keys` have nothing there, a few of what runs at once are kept for them:
        one that comes waits for nobody's long answer. With a single key, or when all are there,
        nothing is kept.
        """
        absent = keys - keys_inside
        if not by_key or absent < 1 or math.isinf(self.running):
            return taken < self.count
        kept = min(max(1, self.running // KEPT_SHARE), absent)
        return taken < min(self.running - kept, self.count - 1)

    def has_room_for_prompt(self, tokens: int, *, unread_tokens: int, is_shared: bool) -> bool:
        """Whether the engine may have a prompt of a key of which it has `unread_tokens` to read.

        vLLM reads prompts in the order in which they come, so that the prompts of one key would
        keep another's waiting however short that is. Beside others a key has one step of the
        engine ahead of them, alone `STEPS_ALONE`; a longer prompt goes alone.
        """
        steps = 1 if is_shared else STEPS_ALONE
        return not unread_tokens or unread_tokens + tokens <= steps * self.step_tokens
