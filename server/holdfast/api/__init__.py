"""Which requests are admitted, and how are they answered? The layers before vLLM's routes.

Runs in the front end. `application` stacks them: request log, key check, our own routes,
quotas, limits, gate.
"""
