"""What may an operator do? The routes below `/admin`, which clients' keys do not open.

Runs in the front end.

    routes  read a body, ask the supervisor or the engine, and answer
    models  the bodies, as their OpenAPI document shows them
    errors  their errors, and the audit log of their calls
"""

from __future__ import annotations

from holdfast.api.admin.routes import admin_app, admin_route

__all__ = ["admin_app", "admin_route"]
