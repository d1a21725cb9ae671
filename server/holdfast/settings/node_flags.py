"""vLLM's flags for an engine over several nodes: what they need, and what they rule out."""

from __future__ import annotations

import argparse
import ipaddress
import re

from holdfast.errors import UsageError
from holdfast.settings import NodeSettings

FOLLOWER_PORT = 8001
"""The default port of a follower for health and metrics, beside a server on the same machine."""
KEY_REMEDY = (
    "make a key with `openssl rand -hex 32`, copy its file to every node, and name that with "
    "--node-key-file."
)

_MAX_HOST_CHARACTERS = 253
_LABEL = re.compile(r"[A-Za-z0-9_-]{1,63}")
"""Part of a host name between dots: https://www.rfc-editor.org/rfc/rfc1035#section-2.3.4"""
_NO_INTERFACE = re.compile(r"[:\s]")
"""Linux names no interface with one of these (`dev_valid_name`); Python accepts them."""


def add_node_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags, in vLLM's spelling."""
    group = parser.add_argument_group(
        "several nodes",
        "vLLM's flags for an engine over several nodes. `holdfast follow` runs the other nodes.",
    )
    group.add_argument(
        "--nnodes", "-n", type=int, default=1, help="number of nodes, including this one"
    )
    group.add_argument(
        "--master-addr",
        type=address_for_all,
        help="address at which the other nodes reach the head",
    )
    group.add_argument(
        "--node-rank",
        "-r",
        type=int,
        default=0,
        help="above 0, with --headless: follow the head, as `holdfast follow` does",
    )
    group.add_argument("--headless", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--master-port", help=argparse.SUPPRESS)


def refuse_misfits(namespace: argparse.Namespace, nodes: NodeSettings) -> None:
    """Check that the flags of vLLM and ours describe a head, a follower, or a server of one node.

    Raises:
        UsageError: one is missing, or has no meaning beside the others.
    """
    count, rank = namespace.nnodes, namespace.node_rank
    if count < 1:
        raise UsageError(f"--nnodes: {count} is not a number of nodes.", remedy="use 1 or more.")
    if not 0 <= rank < count:
        raise UsageError(
            f"--node-rank {rank} does not exist with --nnodes {count}.",
            remedy="give --nnodes as on the head, and a rank below it.",
        )
    _refuse_half_headless(namespace)
    if count == 1:
        if needless := _files(nodes):
            raise UsageError(
                f"{needless[0]} was given, but the engine runs on this node alone.",
                remedy=f"add --nnodes, or leave out {needless[0]}.",
            )
        return
    if nodes.key_file is None:
        raise UsageError(f"--nnodes {count} needs --node-key-file.", remedy=KEY_REMEDY)
    if not namespace.master_addr:
        raise UsageError(
            f"--nnodes {count} needs --master-addr.",
            remedy="name the address at which the other nodes reach the head.",
        )
    if nodes.keyfile is not None and nodes.certfile is None:
        raise UsageError(
            "--node-ssl-keyfile was given without a certificate.", remedy="add --node-ssl-certfile."
        )


def address_for_all(text: str) -> str:
    """Parse a host name or an address; an ArgumentTypeError for anything else, such as a port.

    Other nodes cannot use one with an interface of this machine, nor can vLLM.
    """
    if not is_host(text):
        raise argparse.ArgumentTypeError(f"expected a host name or an address, not {text!r}")
    if "%" in text:
        raise argparse.ArgumentTypeError(
            f"expected an address that all nodes can use, not {text!r}, which names an interface "
            "of this machine; give the cable addresses that are not link-local"
        )
    return text


def is_host(text: str) -> bool:
    """Return whether it can be a host name, an IPv4 address or an IPv6 address."""
    labels = text.removesuffix(".").split(".")
    is_name = len(text) <= _MAX_HOST_CHARACTERS and all(map(_LABEL.fullmatch, labels))
    return is_name or is_ipv6(text)


def is_ipv6(text: str) -> bool:
    """Return whether it is an IPv6 address, perhaps with its interface after a percent sign."""
    try:
        interface = ipaddress.IPv6Address(text).scope_id
    except ValueError:
        return False
    return interface is None or not _NO_INTERFACE.search(interface)


def _refuse_half_headless(namespace: argparse.Namespace) -> None:
    rank = namespace.node_rank
    if namespace.headless and not rank:
        raise UsageError(
            "--headless is not supported without --node-rank above 0: one front end must own the "
            "HTTP port and the whole engine, so that its READY covers all of it.",
            remedy="leave out --headless on the head; elsewhere, add --nnodes and --node-rank, or "
            "run `holdfast follow`.",
        )
    if rank and not namespace.headless:
        raise UsageError(
            f"--node-rank {rank} is not supported without --headless: only the head listens for "
            "clients.",
            remedy="add --headless, or run `holdfast follow` on this node.",
        )


def _files(nodes: NodeSettings) -> list[str]:
    """Return the flags that name a file."""
    files = {
        "--node-key-file": nodes.key_file,
        "--node-ssl-certfile": nodes.certfile,
        "--node-ssl-keyfile": nodes.keyfile,
    }
    return [name for name, path in files.items() if path is not None]
