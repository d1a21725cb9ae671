"""What vLLM's own layers ask of the workspace, heard by vLLM's own manager on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from vllm.v1.worker import workspace

from holdfast.workspace.manager import WorkspaceManager

_META = torch.device("meta")
_VLLMS_MANAGER: Any = WorkspaceManager.__bases__[0]


class RequestedError(Exception):
    """Ends the layer once it has asked: its kernels need a GPU."""


class _Metered(_VLLMS_MANAGER):  # type: ignore[misc]  # vLLM is Any to us
    """vLLM's manager, which hands out nothing."""

    def get_simultaneous(self, *shapes_and_dtypes: Any) -> NoReturn:
        super().get_simultaneous(*shapes_and_dtypes)
        raise RequestedError


def request_meter(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], int]:
    """A function that calls a layer, and answers how far vLLM's manager had to grow for it."""
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)

    def asked_by(call: Callable[[], object]) -> int:
        workspace.reset_workspace_manager()
        manager = _Metered(_META, 1, 1)
        monkeypatch.setattr(workspace, "_manager", manager)
        with pytest.raises(RequestedError):
            call()
        (grown,) = manager._current_workspaces
        assert grown is not None
        return int(grown.numel())

    return asked_by
