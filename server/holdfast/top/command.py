"""The flags of `holdfast top`, and the connection that outlives the server that it looks at."""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import TextIO

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from holdfast.api.router import STREAM_PATH
from holdfast.errors import NotReachableError, UsageError
from holdfast.remote_server import base_url, check_proxies, read_key, server_verification
from holdfast.settings.flag import Parser, command_parser
from holdfast.status_page.screen import as_text, screen
from holdfast.terminal import is_terminal, replace_what_has_no_code, say
from holdfast.top.reader import EventParser, Mirror, StreamError

CONNECT_SECONDS = 10.0
FIRST_SECONDS = 40.0
"""The time for the first document, where it is printed once."""
SILENT_SECONDS = 40.0
"""The server sends something each 15 s, so after this time the connection is dead."""
MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 30.0
REFRESHES_PER_SECOND = 2
_REMEDY = "check the address, and whether the server runs."
_OF_ANOTHER_TIME = {9, 10}
"""A certificate that is not valid yet, or no longer: X509_V_ERR_CERT_NOT_YET_VALID and
X509_V_ERR_CERT_HAS_EXPIRED, listed below."""
_OF_ANOTHER_HOST = {62, 64}
"""What OpenSSL calls a certificate for another name or address: X509_V_ERR_HOSTNAME_MISMATCH and
X509_V_ERR_IP_ADDRESS_MISMATCH in https://docs.openssl.org/3.0/man3/X509_STORE_CTX_get_error/."""
_EPILOG = """\
Without a terminal, or with --once, it prints the status once. Ctrl-C ends it. Exit codes: 0 ended
by Ctrl-C or printed, 2 bad usage or a wrong key, 3 the server is not reachable (with --once, or
without a terminal).
"""


def top(arguments: Sequence[str]) -> int:
    """Show the status of a server until Ctrl-C, or print it once, and return the exit code.

    Raises:
        UsageError: a flag or a proxy is wrong, the server asks for another key, or has no status
            page.
        NotReachableError: it does not answer, and the status was to be printed once.
    """
    flags = top_parser().parse_args(arguments)
    check_proxies()
    replace_what_has_no_code(sys.stdout)
    watch = _Watch(base_url(flags.url), read_key(flags.api_key_file))
    try:
        if flags.once or not is_terminal(sys.stdout):
            asyncio.run(watch.until_first())
            say(as_text(watch.mirror.document, watch.mirror.now_unix_seconds).rstrip(), sys.stdout)
        else:
            with _drawn(watch, sys.stdout):
                asyncio.run(watch.until_interrupted())
    except KeyboardInterrupt:
        pass
    return 0


def top_parser() -> Parser:
    """Return the parser of the flags."""
    parser = command_parser(
        "top", "URL [flags]", "Show the status page of a server in this terminal.", _EPILOG
    )
    parser.add_argument("url", metavar="URL", help="its address, for example http://spark:8000")
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="file that contains a key of the server"
    )
    parser.add_argument("--once", action="store_true", help="print the status once, as text")
    return parser


class _Watch:
    """Reads the stream of a server, which may go away and come back."""

    def __init__(self, url: str, key: str) -> None:
        self.mirror = Mirror()
        self.problem = "connecting"
        """Why nothing new arrives; empty while the stream is read, and between two of its parts."""
        self._lost_unix_seconds: float | None = None
        self._url = url
        self._key = key

    async def until_first(self) -> None:
        """Return once the document is here.

        Raises:
            UsageError, NotReachableError: as `top` does.
        """
        try:
            async with (
                asyncio.timeout(FIRST_SECONDS),
                self._client() as client,
                aclosing(self._updates(client)) as updates,
            ):
                async for _ in updates:
                    if self.mirror.document:
                        return
        except TimeoutError as error:
            raise self._unreachable(f"it sent no status within {FIRST_SECONDS:.0f} s") from error
        except (httpx.HTTPError, StreamError) as error:
            raise self._unreachable(_told(error), _remedy(error, self._url)) from error
        raise self._unreachable("it closed the connection")

    async def until_interrupted(self) -> None:
        """Keep the mirror up to date, however often the connection breaks.

        Raises:
            UsageError: as `top` does, if there was no document before. A server that has shown one
                may be replaced by another that still starts, or get another key.
        """
        retry_seconds = MIN_RETRY_SECONDS
        while True:
            try:
                async with self._client() as client, aclosing(self._updates(client)) as updates:
                    async for _ in updates:
                        self.problem, retry_seconds = "", MIN_RETRY_SECONDS
                lost = self._ended()
            except (httpx.HTTPError, StreamError) as error:
                lost = _told(error)
            except UsageError as error:
                if not self.mirror.document:
                    raise
                lost = error.cause.removesuffix(".")
            self._tell(f"{lost}; trying again" if lost else "")
            await asyncio.sleep(retry_seconds)
            retry_seconds = min(MAX_RETRY_SECONDS, 2 * retry_seconds)

    @property
    def now_unix_seconds(self) -> float:
        """The server's time; without a connection that of its loss, since nothing gets older."""
        if self.problem and self._lost_unix_seconds is not None:
            return self._lost_unix_seconds
        return self.mirror.now_unix_seconds

    def _tell(self, problem: str) -> None:
        if problem and not self.problem:
            self._lost_unix_seconds = self.mirror.now_unix_seconds
        self.problem = problem

    def _client(self) -> httpx.AsyncClient:
        # The stream is read as it comes: a proxy must not compress it.
        headers = {"Accept-Encoding": "identity"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        timeout = httpx.Timeout(SILENT_SECONDS, connect=CONNECT_SECONDS)
        return httpx.AsyncClient(
            base_url=self._url,
            headers=headers,
            timeout=timeout,
            verify=server_verification(self._url),
        )

    async def _updates(self, client: httpx.AsyncClient) -> AsyncGenerator[None, None]:
        """Yield after each event that the mirror has taken."""
        parser = EventParser()
        headers = {"Last-Event-ID": self.mirror.last_event_id} if self.mirror.document else {}
        async with client.stream("GET", STREAM_PATH, headers=headers) as response:
            self._check(response)
            if self.mirror.document:
                self.problem = ""  # the next event may be a long time away
            async for received in response.aiter_raw():
                for event in parser.events(received):
                    self.mirror.take(event)
                    yield

    def _ended(self) -> str:
        """Return why the stream ended; empty if the server only wants to see the key again."""
        if self.mirror.has_said_goodbye:
            return "the server stopped"
        return "" if self.mirror.has_to_renew else "connection lost"

    def _check(self, response: httpx.Response) -> None:
        """Check whether a response is the stream.

        Raises:
            UsageError: the key is wrong, or there is no such page.
            StreamError: the server cannot answer now.
        """
        status = response.status_code
        if status in {401, 403}:
            raise UsageError(
                f"{self._url} does not accept the key ({status}).",
                remedy="name a file with a key of this server with --api-key-file.",
            )
        if status == 404:
            raise UsageError(
                f"{self._url} has no status page (404).",
                remedy="check the address; a server that was started with --ui off has none.",
            )
        if status != 200:
            raise StreamError(f"the server answers {status}")
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            raise StreamError("the server sent an unexpected response")

    def _unreachable(self, why: str, remedy: str = _REMEDY) -> NotReachableError:
        return NotReachableError(f"{self._url}: {why}.", remedy=remedy)


@contextmanager
def _drawn(watch: _Watch, stream: TextIO) -> Iterator[None]:
    """While entered, the terminal shows what is known; afterwards it is as before."""
    console = Console(file=stream, highlight=False, markup=False)

    def drawing() -> RenderableType:
        mirror = watch.mirror
        head = [Text(watch.problem, style="bold red")] if watch.problem else []
        if not mirror.document:
            return Group(*head)
        lines = console.size.height - len(head)
        return Group(*head, screen(mirror.document, watch.now_unix_seconds, lines=lines))

    with Live(
        console=console,
        screen=True,
        get_renderable=drawing,
        refresh_per_second=REFRESHES_PER_SECOND,
        vertical_overflow="ellipsis",
    ):
        yield


def _told(error: Exception) -> str:
    """Return what an error says; those of httpx may say nothing but their name."""
    return str(error).removesuffix(".") or type(error).__name__


def _remedy(error: BaseException, url: str) -> str:
    """Return what to do about an error of the connection: TLS may be what is wrong with it."""
    if isinstance(error, httpx.RemoteProtocolError) and url.startswith("http://"):
        return f"{_REMEDY} If it has a certificate, try https://."
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            if cause.verify_code in _OF_ANOTHER_HOST:
                return "use a host that its certificate names."
            if cause.verify_code in _OF_ANOTHER_TIME:
                return "renew the server's certificate, or correct this machine's clock."
            return "set SSL_CERT_FILE to the certificate of its authority."
        if isinstance(cause, ssl.SSLError):
            return f"{_REMEDY} If it has no certificate, try http://."
        cause = cause.__cause__ or cause.__context__
    return _REMEDY
