"""`holdfast top URL`: the status page of a server in a terminal, from the same stream.

Runs in a process of its own. `command` keeps the connection, and `reader` reads the stream.
"""
