"""How much memory does the host have left, and when must the engine give way?

Runs in the front end, and in a follower for the memory of its own host.
"""
