"""Imported for its effect: this process has the board that the environment names.

For a process that imports what it is told to, as the fork server does.
"""

from __future__ import annotations

import os

from gpu_paths.fake_boards import BOARDS
from gpu_paths.fake_platform import BOARD_VARIABLE, pretend

DRIVER = pretend(BOARDS[os.environ[BOARD_VARIABLE]])
