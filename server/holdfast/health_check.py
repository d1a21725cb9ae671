"""Is the server of this container ready? The check connects to it directly, past every proxy.

A container is checked every few seconds, so this module imports nothing slow.
"""

from __future__ import annotations

import signal
import socket
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from holdfast.loopback import connectable
from holdfast.settings import ListenSettings
from holdfast.settings.flag import command_parser

DEADLINE_SECONDS = 4
"""Less than the 5 s after which Docker kills a check, so that it can print what it waited for."""
_REQUEST = b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_READY = b"HTTP/1.1 200 "
_FIRST_PROCESS = Path("/proc/1/cmdline")
_COMMANDS = ("serve", "follow")
_DESCRIPTION = "Exit with 0 only if the server or follower of this container is ready."
_EPILOG = """\
The command line of the container's first process says where it listens. To ask elsewhere, give
flags such as --host, --port, --uds and --ssl-certfile. Exit codes: 0 ready, 1 not ready, 2 bad
usage or configuration, 3 VLLM_PLUGINS leaves Holdfast out.
"""


def print_health(
    arguments: Sequence[str], read_listen: Callable[[str, Sequence[str]], ListenSettings]
) -> int:
    """Print the answer of `/readyz`, and return 0 if the server or follower is ready, else 1.

    `arguments` are flags of `holdfast serve`. By default, those of the first process of this
    container apply. `read_listen` gets a command and its arguments.
    """
    command_parser("health", "[flags of holdfast serve]", _DESCRIPTION, _EPILOG).parse_known_args(
        arguments
    )
    signal.signal(signal.SIGALRM, _expire)
    signal.alarm(DEADLINE_SECONDS)
    try:
        given = ("serve", arguments) if arguments else first_command(_FIRST_PROCESS.read_bytes())
        with _connected(read_listen(*given)) as connection:
            connection.sendall(_REQUEST)
            answer = connection.makefile("rb").readline()
    except OSError as error:  # ssl.SSLError is one
        print(f"/readyz: {error}")  # noqa: T201 - what was asked for
        return 1
    print(f"/readyz: {answer.decode('latin-1').strip() or 'no answer'}")  # noqa: T201 - as above
    return 0 if answer.startswith(_READY) else 1


def first_command(command_line: bytes) -> tuple[str, Sequence[str]]:
    """Return `serve` or `follow`, and its arguments, from a command line in the kernel's form.

    Without either it is `serve` without arguments. The server masks keys in its command line, but
    they are not part of its address.
    """
    words = command_line.decode("utf-8", errors="surrogateescape").removesuffix("\0").split("\0")
    places = [place for place, word in enumerate(words) if word in _COMMANDS]
    return (words[places[0]], words[places[0] + 1 :]) if places else ("serve", ())


def _connected(settings: ListenSettings) -> socket.socket:
    if settings.uds:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(settings.uds)
    else:
        connection = socket.create_connection((connectable(settings.host), settings.port))
    if not settings.is_tls:
        return connection
    # Not verified: the certificate names the public host, and the peer is in this container.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(connection)


def _expire(*_: object) -> NoReturn:
    raise TimeoutError(f"no answer within {DEADLINE_SECONDS} s")
