"""Trains weights for a demo model that answers; the server neither imports nor ships this package.

    python -m demo_training train --directory build/demo-weights    writes checkpoints
    python -m demo_training export --directory build/demo-weights   puts weights into the package
    python -m demo_training score                                   scores those of the package

`skills/` writes the lessons by code, `chats` turns them into tokens as the demo model's tokenizer
does, `network` is a Llama in plain torch, `training` runs the optimizers, and `exam` scores each
skill on phrasings that no lesson used. The same seed, torch and kind of CPU give the same weights.
"""
