"""Who may ask, and how? The layers between the listener and vLLM's application.

What passes each chunk of an answer on is a plain function that returns what is to be awaited: the
event loop goes through every coroutine on the way anew for each chunk.
"""
