"""What may a client send before its request is complete? Sockets, TLS and limits below ASGI.

Runs in the front end, and in a follower for its health routes. It bounds the bytes, the time and
the number of everything that arrives over a connection, since an application sees none of it: the
request line, the headers, the body as it streams in, and silent connections. A refusal is an OpenAI
error, counted by reason.
"""
