"""What may a client send before its request is complete? Sockets, TLS and limits below ASGI.

Runs in the front end, and in a follower for its health routes. It bounds the bytes, the time and
the number of everything that arrives over a connection, since an application sees none of it: the
request line, the headers, the body as it streams in, and silent connections. A refusal is an OpenAI
error, counted by reason.

    server                the socket, open before anything else is ready
    own_socket            the socket of our own client, which no other process can use
    unix_socket, tls      binds a Unix socket; the certificates
    acceptor              accepts connections, and closes those for which there is no slot
    connection_table      every open connection, and which is evicted if there are too many
    bounded_connection    the slot, the deadlines, the refusals and the end of a connection
    http_connection       what surrounds uvicorn's connection for HTTP
    websocket_connection  what surrounds uvicorn's connection for WebSockets
    errors                what a client gets that exceeds a limit
"""
