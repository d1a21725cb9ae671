"""Runs other people's tools in a process of their own, since they trust the server.

They read answers of any length, for any time, and follow redirects. So the child may have 2 GiB of
memory, may connect to nothing but the server, or the proxy that the environment names, and is
killed when its check ends. It gets a `Wish` on standard input and writes `Row`s to standard output.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import resource
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal
from urllib.request import getproxies

import httpx
from pydantic import TypeAdapter, ValidationError

from holdfast.verify.answers import beginning, excerpt
from holdfast.verify.redaction import redacted
from holdfast.verify.trial import InconclusiveError

_COMMAND = (sys.executable, "-P", "-m", "holdfast.verify.other_tools")
_MEMORY_BYTES = 2 * 1024 * 1024 * 1024
_TEXT_CHARACTERS = 2000
_MAX_WARNINGS = 20
_MAX_BYTES = 8 * 1024 * 1024
"""The maximum of all rows: more is not from this code."""
_TAIL_BYTES = 16 * 1024
_READ_BYTES = 64 * 1024
_SWEEP = "callability.advertised-models"
"""Provider-check's row about the first model that is listed, also where it shall ask another."""
_PORTS = {"https": 443, "socks5": 1080, "socks5h": 1080}
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Wish:
    """What a tool shall look at."""

    tool: Literal["canitoolcall", "provider-check"]
    url: str
    model: str
    api_key: str = ""
    secrets: tuple[str, ...] = ()
    """What no row may contain."""
    scenarios: tuple[str, ...] = ()
    """The scenarios of canitoolcall, by their ids; empty for all."""
    max_tokens: int = 0
    """The maximum of an answer in a scenario."""
    timeout_seconds: float = 0.0
    """The timeout of canitoolcall, for each read."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a tool says of one thing."""

    name: str
    status: str
    said: str = ""
    warnings: tuple[str, ...] = ()
    is_streamed: bool = False
    is_twin: bool = False
    """Whether it compares a stream with the answer at once."""
    is_forced: bool = False
    """Whether the scenario demands a function by its name."""
    is_continued: bool = False
    """Whether the scenario begins after a call, and without what the model thought before it."""


_WISH, _ROWS = TypeAdapter(Wish), TypeAdapter(tuple[Row, ...])


async def rows_of(wish: Wish) -> tuple[Row, ...]:
    """What the tool says; its process has ended when this returns, raises or is cancelled.

    Raises:
        InconclusiveError: it said nothing that can be read.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *_COMMAND, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    )
    try:
        _, told, errors = await asyncio.gather(
            _write(process.stdin, json.dumps(asdict(wish)).encode()),
            _all(process),
            tail_of(process.stderr),
        )
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()  # wait() returns only once both pipes are read to the end
    if len(told) > _MAX_BYTES:
        raise InconclusiveError(f"{wish.tool} wrote more than {_MAX_BYTES} bytes")
    try:
        if code == 0:
            return _ROWS.validate_json(told)
    except ValidationError:
        errors = b"what it wrote is not a list of rows"
    last = redacted(last_line(errors), wish.secrets)
    raise InconclusiveError(f"{wish.tool} ended with {code}: {excerpt(last)}")


async def _write(stream: asyncio.StreamWriter | None, content: bytes) -> None:
    if stream is not None:
        with suppress(ConnectionError):  # the child has ended already, and says why
            stream.write(content)
            await stream.drain()
        stream.close()


async def _all(process: asyncio.subprocess.Process) -> bytes:
    """What it writes to standard output; it is killed once that is too much."""
    found, stream = bytearray(), process.stdout
    while part := await stream.read(_READ_BYTES) if stream else b"":
        if len(found) <= _MAX_BYTES:
            found += part
        elif process.returncode is None:
            process.kill()
    return bytes(found)


async def tail_of(stream: asyncio.StreamReader | None) -> bytes:
    """The end of what a process writes, however much that is."""
    found = b""
    while part := await stream.read(_READ_BYTES) if stream else b"":
        found = (found + part)[-_TAIL_BYTES:]
    return found


def last_line(errors: bytes) -> str:
    """The last line of what `tail_of` has kept."""
    lines = errors.decode("utf-8", "replace").strip().splitlines() or ["it said nothing"]
    is_whole = len(lines) > 1 or len(errors) < _TAIL_BYTES
    return lines[-1] if is_whole else "its last line is too long"  # a secret may be cut in it


def main() -> None:
    """Confine this process, run the tool and write its rows."""
    _limit()
    wish = _WISH.validate_json(sys.stdin.buffer.read())
    _admit_only(wish.url)
    tools = {"canitoolcall": _canitoolcall, "provider-check": _provider_check}
    with redirect_stdout(sys.stderr):
        rows = tools[wish.tool](wish)
    sys.stdout.write(json.dumps([asdict(_bounded(row, wish.secrets)) for row in rows]))


def _limit() -> None:
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    own = _MEMORY_BYTES if most == resource.RLIM_INFINITY else min(_MEMORY_BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (own, own))


def _admit_only(url: str) -> None:
    """Refuse every other address than that of the server or of a proxy, for good.

    Where a proxy connects to is not seen here.
    """
    proxies = [where for kind, where in getproxies().items() if kind in ("http", "https", "all")]
    urls = [httpx.URL(one if "://" in one else f"http://{one}") for one in (url, *proxies)]
    ports = {(one.host, one.port or _PORTS.get(one.scheme, 80)) for one in urls}
    names = {name for one in urls for name in (one.host, one.raw_host.decode("ascii"))}
    known: set[tuple[str, int]] = set()

    def admit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.getaddrinfo":
            host = arguments[0]
            name = host.decode("ascii", "replace") if isinstance(host, bytes) else str(host)
            if name.casefold() not in names:
                raise PermissionError(f"{name} is not the server")
        if event == "socket.connect" and arguments[1][:2] not in known:
            known.update(address for one in ports for address in _addresses(*one))
            if arguments[1][:2] not in known:
                raise PermissionError(f"{arguments[1][:2]} is not the server")

    sys.addaudithook(admit)


def _addresses(host: str, port: int) -> list[tuple[str, int]]:
    """What the name stands for; nothing where only a proxy knows it."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [(str(address[0]), int(address[1])) for *_, address in found]


def _canitoolcall(wish: Wish) -> list[Row]:
    from canitoolcall import probe  # noqa: PLC0415 - here only if the extra is

    scenarios = [
        replace(
            one,
            messages=_with_plain_ids(one.messages),
            extra_body={**one.extra_body, "max_tokens": wish.max_tokens},
        )
        for one in probe.BUILTIN_SCENARIOS
        if not wish.scenarios or one.id in wish.scenarios
    ]
    forced = {one.id for one in scenarios if not isinstance(one.tool_choice, str)}
    continued = {
        one.id for one in scenarios if any(said["role"] == "assistant" for said in one.messages)
    }
    done = probe.probe(
        f"{wish.url}/v1",
        wish.model,
        api_key=wish.api_key or None,
        scenarios=scenarios,
        timeout_s=wish.timeout_seconds,
    )
    return [
        Row(
            name=row.scenario_id,
            status=row.status,
            said=row.detail or "",
            warnings=row.warnings,
            is_streamed=row.stream,
            is_twin=row.check == probe.EQUIVALENCE_CHECK,
            is_forced=row.scenario_id in forced,
            is_continued=row.scenario_id in continued,
        )
        for row in done.outcomes
    ]


def _with_plain_ids(messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """The messages with ids of calls that every model takes.

    Mistral's tokenizers v3 to v11 take nothing but nine letters and digits.
    """
    ids = [call["id"] for said in messages for call in said.get("tool_calls", ())]
    plain = {one: f"probe{number:04}" for number, one in enumerate(ids)}
    changed: list[Mapping[str, Any]] = []
    for said in messages:
        if "tool_calls" in said:
            calls = [{**call, "id": plain[call["id"]]} for call in said["tool_calls"]]
            changed.append({**said, "tool_calls": calls})
        elif "tool_call_id" in said:
            changed.append({**said, "tool_call_id": plain[said["tool_call_id"]]})
        else:
            changed.append(said)
    return tuple(changed)


def _provider_check(wish: Wish) -> list[Row]:
    from tr_provider_check.checks import run_checks  # noqa: PLC0415 - here only if the extra is

    done = asyncio.run(
        run_checks(
            base_url=f"{wish.url}/v1",
            api_key=wish.api_key or None,
            model=wish.model,
            max_sweep_models=1,
        )
    )
    return [
        Row(row.id, row.status, row.assertion)
        for row in done.checks
        if row.id != _SWEEP or _is_only_about(wish.model, row.measured)
    ]


def _is_only_about(model: str, measured: Mapping[str, Any]) -> bool:
    """Whether the sweep asked no other model, such as one for embeddings that is listed first."""
    return all(one["model"] == model for one in measured.get("models", ()))


def _bounded(row: Row, secrets: Sequence[str]) -> Row:
    """The row with short texts; a secret is hidden first, since a part of it is not found."""
    row = redacted(row, secrets)
    return replace(
        row,
        name=beginning(row.name, _TEXT_CHARACTERS),
        said=beginning(row.said, _TEXT_CHARACTERS),
        warnings=tuple(beginning(one, _TEXT_CHARACTERS) for one in row.warnings[:_MAX_WARNINGS]),
    )


if __name__ == "__main__":
    main()
