"""What a client keeps open between two requests."""

from __future__ import annotations

import httpx

NO_KEEP_ALIVE = httpx.Limits(max_keepalive_connections=0)
"""No connection: the server may close one at the moment of the next request."""
