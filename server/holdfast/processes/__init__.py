"""The engine's processes, from outside: how they start, die and are cleaned up.

Runs in the front end and in a follower; `forkserver`, `preloaded` and `imports` also run in the
process that forks engines.
"""
