"""What may a client ask before its request is whole? Sockets, TLS and limits below ASGI.

Runs in the front end. Bytes, time and number of everything that comes in over a connection are
bounded here, since an application sees none of it: the first line, the headers, the body as it
streams in, and connections that say nothing. A refusal is an OpenAI error, counted by reason.
"""
