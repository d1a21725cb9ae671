"""The process that runs the ranks of a follower: `python -m holdfast.engine.launch.node_ranks`.

It does what `vllm serve --headless` does (vLLM 0.32 `run_headless`), with the flags of the head
and with the files of one generation; see `node_executor`. It ends with its parent, the follower,
and when a worker ends.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from pathlib import Path

from holdfast.errors import ExitCode, HoldfastError
from holdfast.nodes import strict_json
from holdfast.nodes.messages import Start
from holdfast.processes import exits, imports, tree
from holdfast.worker.crash_records import NODE_FAILED, last_line, record_causes
from holdfast.worker.lifetime import PARENT_VARIABLE, die_with_parent, leave_group

logger = logging.getLogger("vllm.holdfast")


def main(arguments: list[str]) -> int:
    """Run the ranks that the order in a file describes, with their files in a directory.

    The third path is that of a file which outlives this process, see `wait_for_last_engine`. It
    returns when a worker has ended, or could not start.
    """
    order_file, directory, baseline = map(Path, arguments)
    try:
        with imports.uncollected():
            from holdfast.engine.launch.node_executor import run  # noqa: PLC0415 - imports vLLM
        order = strict_json.as_record(Start, strict_json.parsed(order_file.read_bytes()))
        run(order, directory, baseline)
    except HoldfastError as error:
        _record(directory, error, error.line)
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - without a record, the head sees a lost node
        # vLLM may have no log yet, and would shorten it.
        traceback.print_exception(error)
        _record(directory, error, last_line(error))
    return ExitCode.ENGINE_START


def _record(directory: Path, error: Exception, line: str) -> None:
    """Leave the error to the follower, which passes it on."""
    # Now, since vLLM discards the plug-in's handler when it makes a configuration (0.32).
    record_causes(directory)
    logger.error("%s: %s", NODE_FAILED, line, exc_info=error)


if __name__ == "__main__":
    parent = os.environ.pop(PARENT_VARIABLE, None)
    die_with_parent(int(parent) if parent else None)
    leave_group()
    tree.start_resource_tracker()
    if codes := os.environ.get(exits.DIRECTORY_VARIABLE):
        # vLLM reaps a worker as soon as it has ended, and discards the signal that ended it.
        exits.record_exit_codes(Path(codes))
    sys.exit(main(sys.argv[1:]))
