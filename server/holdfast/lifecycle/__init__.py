"""Is it up? This package holds the state of the server, and everything that changes it.

Runs in the front end, and knows vLLM only through `engine.interface`.
"""
