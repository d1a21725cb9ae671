"""`vllm bench serve` in one process that stays: its import takes longer than most of its runs.

    with BenchClient() as client:
        client.run(url, clients=64, requests=256, seed=1)

It is vLLM's own client, with its own arguments. `python benchmarks/clients.py` is the process: it
reads the arguments of one run as a JSON line, and writes the result as another.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

Result = Mapping[str, Any]
TTFTS = "ttfts"
"""The seconds to the first token of each request."""
_STOP_SECONDS = 10.0


class Client(Protocol):
    """A client of a server: `BenchClient`, or the sockets of `connections.py`."""

    def run(self, url: str, *, clients: int, requests: int, seed: int) -> Result:
        """Measure one burst, under the names of `vllm bench serve`."""


class BenchClient:
    """A process of `vllm bench serve`, which ends with the `with` statement."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(_STOP_SECONDS)

    def run(  # noqa: PLR0913 - what one run of a load is made of
        self,
        url: str,
        *,
        clients: int,
        requests: int,
        seed: int,
        input_tokens: int = 64,
        output_tokens: int = 64,
    ) -> Result:
        """Measure streaming chats, `clients` at a time, each with exactly `output_tokens`.

        The seed chooses the prompts: both sides of a pair get the same, and no two pairs do, so
        that no prefix cache helps.

        Raises:
            SystemExit: a request failed, or the client did.
        """
        arguments = {
            "backend": "openai-chat",
            "base-url": url,
            "endpoint": "/v1/chat/completions",
            "model": self._model,
            "dataset-name": "random",
            "random-input-len": input_tokens,
            "random-output-len": output_tokens,
            "num-prompts": requests,
            "max-concurrency": clients,
            "seed": seed,
            "temperature": 0,
            "percentile-metrics": "ttft,tpot,itl,e2el",
            "metric-percentiles": "50,99",
            "ready-check-timeout-sec": 0,
        }
        given = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
        self._input.write(json.dumps([*given, "--disable-tqdm", "--save-detailed"]) + "\n")
        self._input.flush()
        line = self._output.readline()
        if not line:
            sys.exit(
                "error: vllm bench serve ended; run `python benchmarks/clients.py` to see why."
            )
        result: Result = json.loads(line)
        if result["failed"]:
            sys.exit(f"error: {result['failed']} requests of vllm bench serve failed.")
        return result

    @property
    def _input(self) -> Any:
        return self._process.stdin

    @property
    def _output(self) -> Any:
        return self._process.stdout


def main() -> None:
    """Run each line of standard input, until it ends."""
    # vLLM prints its tables on standard output, which is for the results alone.
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from vllm.benchmarks.serve import add_cli_args, main_async  # noqa: PLC0415 - 10 s
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415 - as above

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    for line in sys.stdin:
        result = asyncio.run(main_async(parser.parse_args(json.loads(line))))
        kept = {name: value for name, value in result.items() if _is_plain(value)}
        print(json.dumps(kept | {TTFTS: result[TTFTS]}), file=results)


def _is_plain(value: object) -> bool:
    return isinstance(value, int | float | str | bool)


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))  # its modules would hide others of the same name
    main()
