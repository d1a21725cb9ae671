"""What `scoring_double` can do wrong, one thing at a time."""

from __future__ import annotations

from typing import Literal

PathFault = Literal[
    "a NaN row",
    "decodes with positions off by one",
    "decodes with a quantized head",
    "the last block of a chunk dropped",
    "a prefix that lacks its last block",
    "two rows of a batch swapped",
    "an adapter that changes its neighbours",
    "penalties in the log-probs",
    "penalties without effect",
    "a grammar that rounds",
    "a grammar without effect",
    "wide lists that are rounded",
    "answers without log-probs that stray",
    "a weight scaled by 1.01 after a restart",
    "needles lost in the middle",
]
"""One path is wrong, and the others show it."""

SharedFault = Literal[
    "a weight scaled by 1.01",
    "two rows of the head swapped",
    "a quantized head",
    "positions off by one",
    "a template changed by a space",
    "a sampler that strays",
    "biased first tokens of short prompts",
]
"""All paths are wrong alike: only a baseline shows it."""

LongFault = Literal["positions off by one after 4,096"]
"""All paths are wrong alike, and only behind a long context."""

Trait = Literal[
    "noise of 0.003 nat", "noise of 2 nats", "a cache that is off", "processed log-probs"
]
"""Of servers that are well, or that cannot be judged."""

Peculiarity = PathFault | SharedFault | LongFault | Trait | Literal[""]
