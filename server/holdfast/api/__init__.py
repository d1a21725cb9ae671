"""Who may ask, and how is it answered? The layers between the listener and vLLM's routes.

Runs in the front end. `app` stacks them: request log, key check, our own routes, limits, gate.
"""
