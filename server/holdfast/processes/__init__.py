"""The engine's processes, from outside: how they start, die and are cleaned up.

Runs in the front end; `forkserver` and `preloaded` also run in the process that forks engines.
"""
