"""A server that refuses whatever it is asked, as cheaply as uvicorn can.

python -m uvicorn --app-dir benchmarks --interface asgi3 refuser:refuse
"""

from __future__ import annotations

import json

from starlette.types import Receive, Scope, Send

BODY = json.dumps({"error": {"message": "Try again later.", "code": 429}}).encode()
HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(BODY))]


async def refuse(_scope: Scope, _receive: Receive, send: Send) -> None:
    """Answer 429."""
    await send({"type": "http.response.start", "status": 429, "headers": HEADERS})
    await send({"type": "http.response.body", "body": BODY})
