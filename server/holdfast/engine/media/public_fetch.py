"""Fetches the URLs that clients name, only from public addresses and within a time limit.

vLLM 0.32 asks whatever a URL names, follows redirects, and waits up to 105 s: clients could look
into the server's own network, and at its cloud's metadata. Here a name's addresses are checked when
it is resolved, and each again when its socket is made, so a name that gets another address in
between gains nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from functools import partial
from typing import Any
from urllib.request import getproxies, proxy_bypass

import aiohttp
import psutil
from aiohttp.abc import AbstractResolver, ResolveResult
from vllm import envs
from vllm.connections import HTTPConnection
from yarl import URL

from holdfast.engine.media.budgets import MediaBudget, budgets_of_request

TIMES_THE_TIME_OUT = 3
"""Fetching all media of one request may take this many of vLLM's timeouts: 15 s for images."""
RETRY_SECONDS = 1.0
CHUNK_BYTES = 64 * 1024

_CLOUD_NETWORKS = tuple(
    map(ipaddress.ip_network, ("168.63.129.16", "192.0.0.0/24", "64:ff9b:1::/48"))
)
"""Services of Azure and Oracle for their machines, and IPv4 gateways: global to Python 3.11."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_TRANSIENT = (TimeoutError, aiohttp.ClientConnectionError)
_FIRST_TRANSIENT_STATUS = 500

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
CountBytes = Callable[[int], None]
"""Raises a ValueError if a budget does not allow this many more bytes."""


class NotPublicError(ValueError):
    """The address of a URL belongs to this machine or its network, or is not routable."""


class FetchError(ValueError):
    """What a URL names did not come, is too large, or has moved."""


class PublicConnection(HTTPConnection):  # type: ignore[misc]  # vLLM is Any to us
    """vLLM's HTTP client for media, within the budgets of the request that is served.

    `is_listed` says that the operator has listed the hosts, so they may have any address;
    `follows_redirects` says that they may redirect.
    """

    def __init__(self, names: Executor, *, is_listed: bool, follows_redirects: bool) -> None:
        super().__init__()
        self._names = names
        self._is_listed = is_listed
        self._follows_redirects = follows_redirects

    def get_bytes(self, url: str, **options: Any) -> bytes:
        """As `async_get_bytes`, for a thread without an event loop.

        Cross-encoders fetch a query first, and then again with each document (0.32, 0.33), so the
        first body is kept.
        """
        budgets = budgets_of_request()
        if budgets.first_fetched is None:
            budgets.first_fetched = url, asyncio.run(self._in_time(url, **options))
        first_url, body = budgets.first_fetched
        return body if url == first_url else asyncio.run(self._in_time(url, **options))

    async def async_get_bytes(self, url: str, **options: Any) -> bytes:
        """Return the body at a URL, when the request has a slot; see `_in_time`."""
        return await self._in_time(url, budgets_of_request().slots, **options)

    async def _in_time(
        self,
        url: str,
        slots: contextlib.AbstractAsyncContextManager[Any] | None = None,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - vLLM's name
        max_bytes: int | None = None,
        request_budget: Any = None,
        **_allow_redirects: Any,  # vLLM would follow them by default
    ) -> bytes:
        """Return the body at a URL.

        `request_budget` is vLLM's own for all downloads of a request (0.33).

        Raises:
            NotPublicError, FetchError, TimeoutError, aiohttp.ClientError, OSError: there is none.
        """
        seconds = timeout or envs.VLLM_IMAGE_FETCH_TIMEOUT
        charge = request_budget.charge if request_budget is not None else None
        with budgets_of_request().fetching(TIMES_THE_TIME_OUT * seconds) as left_seconds:
            async with asyncio.timeout(left_seconds), slots or contextlib.nullcontext():
                return await self._with_retries(url, seconds, max_bytes, charge)

    async def _with_retries(
        self, url: str, seconds: float, max_bytes: int | None, charge: CountBytes | None
    ) -> bytes:
        for _ in range(max(envs.VLLM_MEDIA_FETCH_MAX_RETRIES, 1) - 1):
            with contextlib.suppress(*_TRANSIENT):
                async with asyncio.timeout(seconds):
                    return await self._fetched(url, max_bytes, charge)
            await asyncio.sleep(RETRY_SECONDS)
        return await self._fetched(url, max_bytes, charge)

    async def _fetched(self, url: str, max_bytes: int | None, charge: CountBytes | None) -> bytes:
        async with (
            self._session(URL(url)) as session,
            session.get(url, allow_redirects=self._follows_redirects) as answer,
        ):
            if answer.status >= _FIRST_TRANSIENT_STATUS:
                raise aiohttp.ClientConnectionError(f"status {answer.status}")
            if answer.status != 200:
                raise FetchError(f"status {answer.status}")
            return await _body(answer, max_bytes, charge, budgets_of_request().bytes)

    def _session(self, url: URL) -> aiohttp.ClientSession:
        host = url.host or ""
        if url.scheme not in {"http", "https"} or not host:
            raise FetchError("the URL names no web host")
        is_proxied = url.scheme in getproxies() and not proxy_bypass(host)
        if not self._is_listed:
            _check_literal(host)
        # A proxy decides what it may reach: it resolves the name, and we connect only to it.
        allows_any_address = self._is_listed or is_proxied
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                resolver=Resolver(self._names, allows_any_address=allows_any_address),
                socket_factory=None if allows_any_address else public_socket,
                use_dns_cache=False,
            ),
            # One client must not send the cookies of another.
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers(**{"Accept-Encoding": "identity"}),
            timeout=aiohttp.ClientTimeout(total=None),
            trust_env=is_proxied,
        )


async def _body(
    answer: aiohttp.ClientResponse,
    max_bytes: int | None,
    charge: CountBytes | None,
    budget: MediaBudget,
) -> bytes:
    chunks: list[bytes] = []
    received = 0
    async for chunk in answer.content.iter_chunked(CHUNK_BYTES):
        received += len(chunk)
        if not budget.try_take(len(chunk)) or received > (max_bytes or received):
            raise FetchError("larger than one request may fetch")
        if charge is not None:
            charge(len(chunk))
        chunks.append(chunk)
    return b"".join(chunks)


class Resolver(AbstractResolver):
    """Looks names up in threads of its own, so that a slow name server delays nothing else."""

    def __init__(self, threads: Executor, *, allows_any_address: bool) -> None:
        self._threads = threads
        self._is_free = allows_any_address

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return all addresses of a name; NotPublicError if one of them is not public."""
        look_up = partial(socket.getaddrinfo, host, port, family=family, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, look_up)
        addresses = [str(to[0]) for *_, to in found]
        if not self._is_free:
            for address in addresses:
                _check(ipaddress.ip_address(address))
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=kind,
                proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address, (kind, _, protocol, _, _) in zip(addresses, found, strict=True)
        ]

    async def close(self) -> None:
        """Do nothing: the threads are shared."""


def public_socket(address: Any) -> socket.socket:
    """Return a socket to connect to this address; PermissionError if it is not public."""
    family, kind, protocol, _, to = address
    try:
        _check(ipaddress.ip_address(to[0]))
    except NotPublicError as error:
        # aiohttp expects an OSError here.
        raise PermissionError(str(error)) from error
    return socket.socket(family, kind, protocol)


def is_public(address: IPAddress) -> bool:
    """Whether it belongs neither to this machine, nor to its network, nor to its cloud."""
    return all(
        one.is_global
        and not one.is_multicast
        and not any(one in network for network in _CLOUD_NETWORKS)
        and str(one) not in _own_addresses()
        for one in _equivalents(address)
    )


def _equivalents(address: IPAddress) -> Iterator[IPAddress]:
    """Yield the address, and the IPv4 addresses that a gateway or the kernel maps it to."""
    yield address
    if isinstance(address, ipaddress.IPv6Address):
        teredo = address.teredo[1] if address.teredo else None
        nat64 = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else None
        yield from filter(None, (address.ipv4_mapped, address.sixtofour, teredo, nat64))


def _own_addresses() -> set[str]:
    found = psutil.net_if_addrs().values()
    return {one.address.partition("%")[0] for addresses in found for one in addresses}


def _check(address: IPAddress) -> None:
    if not is_public(address):
        raise NotPublicError(f"{address} is not a public address")


def _check_literal(host: str) -> None:
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        if not is_public(address):
            raise NotPublicError(f"{address} is not a public address")
