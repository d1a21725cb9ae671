"""One vLLM engine, as the front end sees it: starting it, asking it, outliving it.

Runs in the front end, except `node_ranks` and `node_executor`, which run a follower's ranks in a
process of its own. `interface` is what the rest of the server may ask of it.
"""
