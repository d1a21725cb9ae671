"""What may an operator do? The routes below `/admin`, which clients' keys do not open.

Runs in the front end.
"""

from __future__ import annotations

from holdfast.api.admin.routes import admin_app, admin_route

__all__ = ["admin_app", "admin_route"]
