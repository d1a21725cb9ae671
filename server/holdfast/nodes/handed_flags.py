"""Which flags of the head's command line do the ranks on other nodes need?

All of vLLM's, as nobody knows better than vLLM which of them a rank depends on. Left out are those
that differ between the nodes, those of the listener and of Holdfast's front end, and secrets, since
the connection between the nodes may be readable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain

from holdfast.settings import flags

_WITH_VALUE = frozenset(
    {
        *("--host", "--port", "--uds", "--root-path"),
        *("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-ciphers"),
        *("--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port"),
        *("--chat-template", "--config"),
        # vLLM's parser completes the name of a flag.
        *("--hf-token", "--hf-toke", "--hf-tok", "--hf-to", "--hf-t"),
    }
)
_WITH_VALUES = frozenset({"--api-key"})
"""Each takes all words up to the next flag."""


def handed_out(
    arguments: Sequence[str], *, revision: str = "", tokenizer_revision: str = ""
) -> tuple[str, ...]:
    """Return the flags for the ranks on other nodes; `--demo` is one of them.

    `arguments` are those of `serve` with the `--config` file read and the names of flags
    normalised. `revision` is the commit of a model from the Hub, in place of the branch that a user
    may have named: a node would take the newest commit that it finds there. `tokenizer_revision` is
    that of a tokenizer from elsewhere.
    """
    pinned = {"--revision": revision, "--tokenizer-revision": tokenizer_revision}
    replaced = {flag: commit for flag, commit in pinned.items() if commit}
    return (*_kept(arguments, frozenset(replaced)), *chain.from_iterable(replaced.items()))


def _kept(arguments: Sequence[str], replaced: frozenset[str]) -> Iterator[str]:
    ours = {flag.name: 0.0 if flag.is_switch else 1.0 for flag in flags()}
    with_value = dict.fromkeys(_WITH_VALUE | replaced, 1.0)
    dropped = {**ours, **with_value, **dict.fromkeys(_WITH_VALUES, math.inf)}
    values_left = 0.0
    for argument in arguments:
        is_flag = argument.startswith("-") and not _is_number(argument)
        if values_left and not is_flag:
            values_left -= 1
            continue
        name, equals, _ = argument.partition("=")
        is_dropped = is_flag and name in dropped
        values_left = dropped[name] if is_dropped and not equals else 0.0
        if not is_dropped:
            yield argument


def _is_number(argument: str) -> bool:
    try:
        float(argument)
    except ValueError:
        return False
    return True
