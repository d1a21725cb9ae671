"""Which requests are admitted, and how are they answered? The layers before vLLM's routes.

Runs in the front end; `follower_health` and `metrics` run in a follower. `application` stacks
the layers: request log, other origins, key check, our own routes, quotas, limits, gate.
"""
