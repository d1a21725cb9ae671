"""The API of a cluster in which every object that Helm looks up has some number of replicas.

It runs in the environment of render_chart.py, so it imports nothing of the server.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KINDS = {
    "apps/v1": ("deployments", "Deployment"),
    "leaderworkerset.x-k8s.io/v1": ("leaderworkersets", "LeaderWorkerSet"),
}


@contextmanager
def cluster(replicas: int) -> Iterator[str]:
    """The URL of one."""
    handler = type("Handler", (_Handler,), {"replicas": replicas})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    replicas: int

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].removeprefix("/apis/")
        version = next((one for one in KINDS if path.startswith(one)), "")
        if not version:
            status = {"kind": "Status", "apiVersion": "v1", "reason": "NotFound", "code": 404}
            self._answer(404, status)
        elif path == version:
            self._answer(200, _resources(version))
        else:
            named = {"apiVersion": version, "kind": KINDS[version][1], "metadata": {}}
            self._answer(200, {**named, "spec": {"replicas": self.replicas}})

    def _answer(self, status: int, document: dict[str, Any]) -> None:
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name
        """Nothing: standard error is for Helm."""


def _resources(version: str) -> dict[str, Any]:
    name, kind = KINDS[version]
    resource = {"name": name, "kind": kind, "namespaced": True, "verbs": ["get"]}
    listed = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version}
    return {**listed, "resources": [resource]}
