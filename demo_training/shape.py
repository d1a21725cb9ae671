"""How large the network is: 1.6 million weights, 3.2 MB as float16."""

from __future__ import annotations

from holdfast.demo.trained import Shape

HIDDEN_SIZE = 192
INTERMEDIATE_SIZE = 512
LAYERS = 4
HEADS = 4
KV_HEADS = 2
HEAD_SIZE = 32
"""Its float32 queries fit into a row of the scratch that the demo model declares."""
SHAPE = Shape(HIDDEN_SIZE, INTERMEDIATE_SIZE, LAYERS, HEADS, KV_HEADS, HEAD_SIZE)
