"""What runs inside vLLM's processes, around each rank.

`plugin` is the entry point that vLLM loads; `hooks` follows a worker from its device to its lock
and through every step.
"""
