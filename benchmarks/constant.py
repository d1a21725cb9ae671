"""uvicorn with an application that sends constant bytes: what a request costs at the least.

It is started like `holdfast serve`, and reads nothing but the port, which is the last argument.
"""

from __future__ import annotations

import sys

import uvicorn
from starlette.types import Receive, Scope, Send

_PAGE = b"#" * 900
"""About as long as `/metrics/routing`."""
_HEADERS = ((b"content-type", b"text/plain"), (b"content-length", b"%d" % len(_PAGE)))


async def answer(_: Scope, __: Receive, send: Send) -> None:
    """Answer each request with the same page."""
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    await send({"type": "http.response.body", "body": _PAGE})


if __name__ == "__main__":
    uvicorn.run(answer, port=int(sys.argv[-1]), log_level="error", access_log=False, lifespan="off")
