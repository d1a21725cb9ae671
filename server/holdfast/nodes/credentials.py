"""The files with which head and follower identify themselves: the shared key, and those of TLS."""

from __future__ import annotations

import logging
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import UsageError, reason_of
from holdfast.nodes.proof import read_key
from holdfast.settings import NodeSettings
from holdfast.settings.node_flags import KEY_REMEDY

logger = logging.getLogger(__name__)

_NO_PASSWORD = ""
"""Without it, OpenSSL would ask the terminal for the password of an encrypted key and block."""


@dataclass(frozen=True, slots=True, repr=False)
class Credentials:
    """What one end of the connections between nodes needs."""

    key: bytes
    context: ssl.SSLContext | None
    """None without TLS."""


def head_credentials(nodes: NodeSettings) -> Credentials:
    """Read the files of the head.

    Raises:
        UsageError: one is missing, cannot be read, or is not what it should be.
    """
    if nodes.key_file is None:
        raise UsageError("a head needs --node-key-file.", remedy=KEY_REMEDY)
    key = _key(nodes.key_file)
    if nodes.certfile is None:
        return Credentials(key, None)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(nodes.certfile, nodes.keyfile, _NO_PASSWORD)
    except OSError as error:  # ssl.SSLError is one
        files = " and ".join(str(path) for path in (nodes.certfile, nodes.keyfile) if path)
        raise UsageError(
            f"--node-ssl-certfile: {files}: {reason_of(error)}.",
            remedy="name a certificate and its key in PEM, without a password.",
        ) from None
    return Credentials(key, context)


def follower_credentials(key_file: Path, ca_certs: Path | None) -> Credentials:
    """Read the files of a follower, which checks the head's name if there are authorities.

    Raises:
        UsageError: one cannot be read, or is not what it should be.
    """
    key = _key(key_file)
    if ca_certs is None:
        return Credentials(key, None)
    try:
        return Credentials(key, ssl.create_default_context(cafile=str(ca_certs)))
    except OSError as error:  # ssl.SSLError is one
        raise UsageError(
            f"--ssl-ca-certs: {ca_certs}: {reason_of(error)}.",
            remedy="name a PEM file of the authorities that signed the head's --node-ssl-certfile.",
        ) from None


def _key(path: Path) -> bytes:
    """Read the key; warn if every user of this machine can, as in a mounted Kubernetes secret."""
    key = read_key(path)
    if path.stat().st_mode & stat.S_IROTH:
        logger.warning(
            "--node-key-file: every user of this machine can read %s; run `chmod 600` on it", path
        )
    return key
