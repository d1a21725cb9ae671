"""Is Holdfast right on this machine's GPU? The kit that says so in one report.

`make gpu-check` runs every check of `checks.CHECKS` against its subject: a workspace manager alone
(`core/`, which needs torch and one file of vLLM), or a server (`engine/`). A subject lives in a
process of its own, `subject_process`; `runner` starts it, holds each check to its deadline and ends
all that it left. What a machine lacks skips checks by name, and `report` writes what came of it.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - users of an older one are told so
    sys.exit("error: Python 3.11 or later is needed. Remedy: make gpu-check PYTHON=/path/to/it")
