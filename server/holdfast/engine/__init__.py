"""One vLLM engine, as the front end sees it: starting it, asking it, outliving it.

Runs in the front end. `interface` is what the rest of the server may ask of it.
"""
