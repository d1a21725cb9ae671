"""What may a client ask before its request is whole? The limits that lie below ASGI.

Bytes, time and number of everything that comes in over a connection are bounded here, since an
application sees none of it: the first line, the headers, the body as it streams in, and connections
that say nothing. What is refused is answered as OpenAI's clients read it, and counted by reason.
"""
