"""The command line of a follower: settings, or one clear line."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli import parse_serve
from holdfast.errors import UsageError
from holdfast.nodes.command_line import FollowSettings, head_address, of_headless, read_follow
from holdfast.settings import MemorySettings

KEY = ("--node-key-file", "/key")
HEADLESS = ("-n", "2", "-r", "1", "--headless", "--master-addr", "10.0.0.1", *KEY)


def read(*arguments: str) -> FollowSettings:
    return read_follow(arguments, {})


def headless(*arguments: str) -> FollowSettings:
    """What vLLM's way to start a follower says."""
    return of_headless(parse_serve(["model", *HEADLESS, *arguments], {}))


def refused(*arguments: str) -> str:
    """The one line that a wrong command line gets."""
    with pytest.raises(UsageError) as caught:
        read(*arguments)
    assert caught.value.remedy
    return caught.value.line


def test_the_defaults() -> None:
    """The port that `serve` takes, the name of this machine, and no TLS."""
    settings = read("10.0.0.1", *KEY)
    assert (settings.head_host, settings.head_port) == ("10.0.0.1", 29600)
    assert (settings.node_name, settings.key_file) == (platform.node(), Path("/key"))
    assert (settings.ca_certs, settings.log_format) == (None, "auto")
    assert (settings.listen.host, settings.listen.port) == ("", 8001)
    assert not settings.listen.has_access_log


def test_every_flag_is_read() -> None:
    """In any order."""
    settings = read(
        *("--node-name", "spark-2", "--ssl-ca-certs=/ca", "head:30000", "--host", "::1"),
        *("--port=0", "--log-level=DEBUG", "--log-format", "json", *KEY),
        *("--host-memory-guard=on", "--host-memory-marks=3MiB,2MiB,1MiB"),
        "--head-drain-timeout=60",
    )
    assert (settings.head_host, settings.head_port) == ("head", 30000)
    assert (settings.node_name, settings.ca_certs) == ("spark-2", Path("/ca"))
    assert (settings.listen.host, settings.listen.port) == ("::1", 0)
    assert (settings.listen.log_level, settings.log_format) == ("debug", "json")
    assert settings.memory == MemorySettings("on", (3 << 20, 2 << 20, 1 << 20))
    assert settings.stop.head_drain_seconds == 60.0


def test_variables_stand_in_for_the_flags_that_serve_has_too() -> None:
    """The flag wins."""
    variables = {
        "HOLDFAST_NODE_KEY_FILE": "/other",
        "HOLDFAST_NODE_NAME": "spark-3",
        "HOLDFAST_HOST_MEMORY_GUARD": "off",
        "HOLDFAST_LOG_FORMAT": "json",
    }
    settings = read_follow(["h"], variables)
    assert (settings.key_file, settings.log_format) == (Path("/other"), "json")
    assert (settings.node_name, settings.memory.guard) == ("spark-3", "off")
    assert read_follow(["h", *KEY], variables).key_file == Path("/key")


def test_a_variable_of_another_flag_is_not_read() -> None:
    """One environment may be that of several containers."""
    assert read_follow(["h", *KEY], {"HOLDFAST_PROBE_TIMEOUT": "long"}).head_host == "h"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1", ("10.0.0.1", 29600)),
        ("head.example:1", ("head.example", 1)),
        ("[fe80::1]", ("fe80::1", 29600)),
        ("[fe80::1%eth0]:65535", ("fe80::1%eth0", 65535)),
        ("fd00::1", ("fd00::1", 29600)),
        ("fe80::1%eth0", ("fe80::1%eth0", 29600)),
    ],
)
def test_an_address_is_read(text: str, address: tuple[str, int]) -> None:
    """IPv6 stands in brackets if a port follows; one text may be that of the head's flag too."""
    assert head_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", ":29600", "host:", "host:0", "host:65536", "host:1:2", "host:-1", "host:port"),
        *("fe80::1:29600", "fe80:::1", "[fe80::1]x", "[fe80::1]:", "[fe80::1", "[10.0.0.1]:5"),
        *("[]:5", "[]", "fe80::1%eth0:29600", "fe80::1%a b", "[fe80::1%a b]:5", "fe80::1%a/b"),
        *("http://host:1", "a b", "host:\N{ARABIC-INDIC DIGIT ONE}", "a/b"),
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    """With the text, and how to write it."""
    line = refused(text, *KEY)
    assert line.startswith("the address of the server: expected ")
    assert repr(text) in line
    assert "in brackets" in line


@given(st.text())
def test_any_text_is_an_address_or_a_usage_error(text: str) -> None:
    """Nothing that is typed ends in another way."""
    try:
        host, port = head_address(text)
    except UsageError as error:
        assert len(error.line.splitlines()) == 1  # noqa: PT017 - either outcome is right
    else:
        assert host
        assert 0 < port < 65536


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("h",), "a follower needs --node-key-file"),
        (KEY, "the following arguments are required: HOST[:PORT]"),
        (("h", "--node-key-file="), "--node-key-file: expected a file"),
        (("h", *KEY, "--node-name", "a b"), "--node-name: expected 1 to 64 letters"),
        (("h", *KEY, "--node-name="), "--node-name: expected 1 to 64 letters"),
        (("h", *KEY, "--node-name", "x" * 65), "--node-name: expected 1 to 64 letters"),
        (("h", *KEY, "--host-memory-guard=maybe"), "--host-memory-guard: expected one of"),
        (("h", *KEY, "--host-memory-marks=1GiB"), "--host-memory-marks: expected three sizes"),
        (("h", *KEY, "--ssl-ca-certs="), "--ssl-ca-certs: expected a file"),
        (("h", *KEY, "--port=65536"), "--port: '65536' is not a port"),
        (("h", *KEY, "--port=http"), "--port: 'http' is not a port"),
        (("h", *KEY, "--host=a\0b"), "--host: it contains a NUL"),
        (("h", *KEY, "--log-level=loud"), "--log-level"),
        (("h", *KEY, "--log-format=xml"), "--log-format: expected one of"),
        (("h", *KEY, "--tensor-parallel-size=2"), "unrecognized arguments"),
        (("h", "model", *KEY), "unrecognized arguments"),
    ],
)
def test_a_wrong_command_line_is_one_line(arguments: tuple[str, ...], named: str) -> None:
    """It names the flag, and what to change."""
    assert named in refused(*arguments)


def test_a_host_name_that_cannot_name_a_node_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the flag that helps."""
    monkeypatch.setattr(platform, "node", lambda: "")
    told = "the host name: '' cannot name a node. Remedy: give the node a --node-name."
    assert told in refused("h", *KEY)


def test_vllms_way_to_start_a_follower_says_the_same() -> None:
    """Without a model, and with the port for health of a follower."""
    expected = read("10.0.0.1", *KEY)
    found = headless()
    assert found.has_ignored_flags
    assert (found.head_host, found.head_port) == (expected.head_host, expected.head_port)
    assert (found.key_file, found.node_name) == (expected.key_file, expected.node_name)
    assert (found.listen, found.ca_certs) == (expected.listen, expected.ca_certs)


def test_vllms_way_takes_what_follow_takes() -> None:
    """Ports, name, TLS, guard and logs."""
    found = headless(
        *("--node-port=30000", "--port=9001", "--host=::1", "--ssl-ca-certs=/ca"),
        "--node-ssl-certfile=/certificate",
        *("--log-format=json", "--log-level=debug", "--node-name=spark-2"),
        "--host-memory-guard=off",
    )
    assert (found.node_name, found.memory) == ("spark-2", MemorySettings("off"))
    assert (found.head_port, found.ca_certs, found.log_format) == (30000, Path("/ca"), "json")
    assert (found.listen.host, found.listen.port) == ("::1", 9001)
    assert found.listen.log_level == "debug"


def test_authorities_for_clients_are_not_those_of_the_head() -> None:
    """The head's command line may name them for certificates of clients."""
    flags = ("--ssl-certfile=/c", "--ssl-keyfile=/k", "--ssl-cert-reqs=2", "--ssl-ca-certs=/ca")
    assert headless(*flags).ca_certs is None


def test_the_keys_of_the_server_are_known_and_not_shown() -> None:
    """They stand there when the head's command line was copied."""
    found = headless("--api-key", "hush-1", "hush-2", "--admin-api-key=hush-3")
    assert found.ignored_keys == ("hush-1", "hush-2", "hush-3")
    assert "hush" not in repr(found)
