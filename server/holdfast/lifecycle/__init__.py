"""Is it up? The state of the server, and everything that moves it.

Runs in the front end, and knows vLLM only through `engine.interface`.
"""
