"""`holdfast plan`: what would be reserved, for which caller, and why, without an engine.

Runs in a process of its own.
"""
