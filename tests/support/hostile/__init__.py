"""An adversary with API keys: what it does to a server, one small function an attack.

`python -m hostile` reads its plan from standard input, and attacks until that ends. It is a process
of its own and nicer than the server, since an adversary has a machine of its own.
"""
