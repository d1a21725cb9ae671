"""`holdfast` with a stand-in for the process that runs the ranks of a follower.

It has one rank, which locks its workspaces once the file exists that its order names, or at once.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from holdfast.errors import UsageError
from holdfast.nodes import strict_json
from holdfast.nodes.messages import Start
from holdfast.worker import lifetime
from holdfast.worker.crash_records import NODE_FAILED, record_causes
from holdfast.workspace.stats import StatsWriter

POLL_SECONDS = 0.02
UNFIT_VARIABLE = "A_TEST_UNFIT"
"""Makes the ranks refuse what they are handed out, as if this node had other GPUs."""
LEAVE_VARIABLE = "A_TEST_LEAVE_SECONDS"
"""Makes the clean-up after the ranks hang, and sets the time that the follower waits for it."""


def run_ranks(order_file: Path, directory: Path) -> None:
    """Be the only rank of an engine until something kills it, and ignore SIGTERM."""
    lifetime.die_with_parent(int(os.environ[lifetime.PARENT_VARIABLE]))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    order = strict_json.as_record(Start, strict_json.parsed(order_file.read_bytes()))
    if os.environ.get(UNFIT_VARIABLE):
        refuse(directory)
    rank, generation = order.node_rank, order.generation
    with StatsWriter(directory, engine=0, rank=rank, generation=generation) as writer:
        while not all(Path(name).exists() for name in order.arguments):
            time.sleep(POLL_SECONDS)
        writer.update(lambda report: replace(report, is_locked=True))
        while True:
            time.sleep(600)


def refuse(directory: Path) -> NoReturn:
    """End as `holdfast.engine.launch.node_ranks` does if the flags mean something else here."""
    record_causes(directory)
    error = UsageError("this node has other GPUs", remedy="use the same ones.")
    logging.getLogger("vllm").error("%s: %s", NODE_FAILED, error.line, exc_info=error)
    sys.exit(error.exit_code)


def main() -> None:
    """Run `holdfast`; the processes that it starts for ranks are this module."""
    from holdfast import cli, follow
    from holdfast.processes import cleanup

    here = Path(__file__)
    paths = (str(here.parent), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    follow.RANKS_MODULE = here.stem
    if leave_seconds := os.environ.get(LEAVE_VARIABLE):
        follow.LEAVE_SECONDS = float(leave_seconds)
        cleanup.remove = lambda directory: time.sleep(600)  # noqa: ARG005 - the name is its own
    cli.main()


if __name__ == "__main__":
    if sys.argv[1] in {"follow", "serve"}:
        main()
    else:
        run_ranks(Path(sys.argv[1]), Path(sys.argv[2]))
