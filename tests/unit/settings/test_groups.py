"""Every value is read as people write it, or refused by name; a flag wins over a variable."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import settings
from holdfast.errors import UsageError
from holdfast.settings import Flag, ListenSettings, LogSettings, RequestLogStyle, Settings
from holdfast.settings.recycling import RecycleLimits

FLAGS = {flag.name: flag for flag in settings.flags()}
VALUES = {
    # flag: (text, value, another text, another value)
    "--workspace-reserve": ("64MiB", 64 << 20, "1kB", 1000),
    "--workspace-headroom": ("0.25", 0.25, "0", 0.0),
    "--workspace-growth": ("deny", "deny", "alongside", "alongside"),
    "--workspace-growth-limit": ("1.5GiB", 3 << 29, "7", 7),
    "--learned-dir": ("none", None, "/x", Path("/x")),
    "--learned-restart": ("never", "never", "always", "always"),
    "--probe": ("quick", "quick", "off", "off"),
    "--probe-timeout": ("9.5", 9.5, "1e2", 100.0),
    "--probe-max-tokens": ("2", 2, "4096", 4096),
    "--probe-require-full": ("1", True, "no", False),
    "--verify-baseline": ("/x", Path("/x"), "y", Path("y")),
    "--admit-unproven": ("1", True, "no", False),
    "--max-waiting": ("0", 0, "7", 7),
    "--max-requests-per-key": ("3", 3, "7", 7),
    "--max-engine-restarts": ("0", 0, "7", 7),
    "--max-body-size": ("64MiB", 64 << 20, "1kB", 1000),
    "--max-buffered-size": ("64MiB", 64 << 20, "1kB", 1000),
    "--max-json-depth": ("1", 1, "256", 256),
    "--max-url-length": ("2KiB", 2048, "1", 1),
    "--max-headers": ("1", 1, "256", 256),
    "--max-header-size": ("4MiB", 4 << 20, "100", 100),
    "--header-timeout": ("0", 0.0, "2.5", 2.5),
    "--body-timeout": ("0", 0.0, "60", 60.0),
    "--send-timeout": ("0", 0.0, "300", 300.0),
    "--websocket-idle-timeout": ("0", 0.0, "3600", 3600.0),
    "--request-timeout": ("0", 0.0, "600", 600.0),
    "--keep-alive-timeout": ("0", 0.0, "75", 75.0),
    "--grammar-timeout": ("30", 30.0, "5", 5.0),
    "--max-connections": ("1", 1, "100000", 100_000),
    "--restart-window": ("60", 60.0, "7", 7.0),
    "--hold-timeout": ("0", 0.0, "7", 7.0),
    "--stall-timeout": ("60", 60.0, "7", 7.0),
    "--drain-timeout": ("0", 0.0, "7", 7.0),
    "--recycle-after": (
        "24h,8GiB",
        RecycleLimits(86_400, 8 << 30),
        "7requests",
        RecycleLimits(requests=7),
    ),
    "--recycle-within": ("0", 0.0, "7", 7.0),
    "--host-memory-guard": ("on", "on", "off", "off"),
    "--host-memory-marks": (
        "4GiB,2GiB,0",
        (4 << 30, 2 << 30, 0),
        "3MiB,3MiB,1",
        (3 << 20, 3 << 20, 1),
    ),
    "--continue-streams": ("off", False, "on", True),
    "--api-key-file": ("/x", Path("/x"), "y", Path("y")),
    "--admin-api-key": ("one", "one", "two=", "two="),
    "--admin-api-key-file": ("/x", Path("/x"), "y", Path("y")),
    "--metrics-auth": ("api-key", "api-key", "none", "none"),
    "--usage-dir": ("/x", Path("/x"), "none", None),
    "--node-port": ("1", 1, "65535", 65535),
    "--node-key-file": ("/x", Path("/x"), "y", Path("y")),
    "--node-name": ("spark-1", "spark-1", "b_2.c", "b_2.c"),
    "--node-ssl-certfile": ("/x", Path("/x"), "y", Path("y")),
    "--node-ssl-keyfile": ("/x", Path("/x"), "y", Path("y")),
    "--log-format": ("json", "json", "console", "console"),
    "--request-log": ("uvicorn", "uvicorn", "none", "none"),
    "--ui": ("off", False, "on", True),
}
SWITCHES = {name for name, flag in FLAGS.items() if flag.is_switch}
ANY_WORD = {
    "--learned-dir",
    "--verify-baseline",
    "--api-key-file",
    "--admin-api-key-file",
    "--admin-api-key",
    "--usage-dir",
    "--node-key-file",
    "--node-ssl-certfile",
    "--node-ssl-keyfile",
}
"""Flags that take nearly every word."""


def value_of(read: Settings, flag: Flag) -> object:
    """What a flag came to."""
    return next(
        getattr(getattr(read, name), member.name)
        for name, group in settings.GROUPS.items()
        for member in fields(group)
        if member.metadata["flag"] == flag
    )


def read(arguments: list[str], environment: dict[str, str]) -> Settings:
    """The groups as the command line has them."""
    parser = argparse.ArgumentParser()
    settings.add_flags(parser)
    return Settings(**settings.read_groups(parser.parse_args(arguments), environment))


def test_the_table_of_this_test_is_complete() -> None:
    """A new flag is tested with the rest."""
    assert set(VALUES) == set(FLAGS)


@pytest.mark.parametrize("name", FLAGS)
def test_a_variable_stands_in_for_the_flag(name: str) -> None:
    """`HOLDFAST_<FLAG>` is read like the flag."""
    text, value, _, _ = VALUES[name]
    assert FLAGS[name].variable == "HOLDFAST_" + name[2:].upper().replace("-", "_")
    assert value_of(read([], {FLAGS[name].variable: text}), FLAGS[name]) == value


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_wins_over_its_variable(name: str) -> None:
    """What stands on the command line holds."""
    text, value, other_text, _ = VALUES[name]
    given = [name] if name in SWITCHES else [f"{name}={text}"]
    assert value_of(read(given, {FLAGS[name].variable: other_text}), FLAGS[name]) == value


@pytest.mark.parametrize("name", FLAGS)
def test_a_variable_wins_over_the_default(name: str) -> None:
    """Also when it says what is not the default in other words."""
    _, _, other_text, other_value = VALUES[name]
    assert value_of(read([], {FLAGS[name].variable: other_text}), FLAGS[name]) == other_value


def test_nothing_given_is_the_default() -> None:
    """Without flags and variables the groups are as declared."""
    assert read([], {}) == Settings()


@pytest.mark.parametrize("name", sorted(set(FLAGS) - SWITCHES - ANY_WORD))
def test_a_wrong_flag_is_refused_by_name(name: str) -> None:
    """The error names the flag and the value."""
    with pytest.raises(UsageError, match=f"^{name}: expected .*, not 'wrong!'") as caught:
        read([f"{name}=wrong!"], {})
    assert name in caught.value.remedy


@pytest.mark.parametrize("name", sorted(set(FLAGS) - ANY_WORD))
def test_a_wrong_variable_is_refused_by_name(name: str) -> None:
    """The error names the variable, the value, and the flag that is documented."""
    variable = FLAGS[name].variable
    with pytest.raises(UsageError, match=f"^{variable}: expected .*, not 'wrong!'") as caught:
        read([], {variable: "wrong!"})
    assert name in caught.value.remedy


@pytest.mark.parametrize("text", [" ", "two words", "tab\t", "nul\0", "newline\n", "ключ"])
def test_a_wrong_secret_is_refused_without_its_value(text: str) -> None:
    """Not even the line that refuses a key shows it."""
    with pytest.raises(UsageError) as caught:
        read([], {"HOLDFAST_ADMIN_API_KEY": text})
    expected = "expected a key of visible ASCII characters without spaces"
    assert caught.value.cause == f"HOLDFAST_ADMIN_API_KEY: {expected}."


def test_a_body_may_not_be_nested_without_end() -> None:
    """What reads a body deeper than this, here or in vLLM, may run into Python's own limit."""
    with pytest.raises(UsageError) as caught:
        read(["--max-json-depth=257"], {})
    assert caught.value.cause == "--max-json-depth: expected a number from 1 to 256, not '257'."
    assert "--max-json-depth" in caught.value.remedy


def test_no_key_is_in_the_text_of_the_settings() -> None:
    """Who prints them for a report prints no key."""
    listen = settings.ListenSettings(api_keys=("hush",))
    keys = settings.KeySettings(admin_api_key="hush")
    given = Settings(listen=listen, keys=keys, vllm_arguments=("--api-key", "hush"))
    assert "hush" not in repr(given)


@given(st.text())
@pytest.mark.parametrize("name", FLAGS)
def test_any_text_is_a_value_or_a_usage_error(name: str, text: str) -> None:
    """No text makes a parser fail in another way."""
    try:
        FLAGS[name].read(text, name)
    except UsageError as error:
        assert len(error.line.splitlines()) == 1  # noqa: PT017 - either outcome is right


def test_the_address_of_a_service_is_not_a_port() -> None:
    """A cluster sets it in every pod beside a Service named `holdfast-node`."""
    assert read([], {"HOLDFAST_NODE_PORT": "tcp://10.96.0.1:29600"}) == Settings()
    with pytest.raises(UsageError, match="HOLDFAST_LEARNED_RESTART"):
        read([], {"HOLDFAST_LEARNED_RESTART": "tcp://10.96.0.1:29600"})


@pytest.mark.parametrize("name", FLAGS)
def test_an_empty_variable_is_not_set(name: str) -> None:
    """A Compose file hands on what is not set as empty."""
    assert read([], {FLAGS[name].variable: ""}) == Settings()


@pytest.mark.parametrize("name", ["--admin-api-key", "--log-format", "--learned-dir"])
def test_an_empty_flag_is_a_mistake(name: str) -> None:
    """Nobody writes one for what is not set."""
    with pytest.raises(UsageError, match=name):
        read([name, ""], {})


@pytest.mark.parametrize(
    ("requests", "is_wanted", "is_logged"),
    [("uvicorn", True, True), ("uvicorn", False, False), ("line", True, False)],
)
def test_uvicorn_logs_accesses_only_in_place_of_our_line(
    requests: RequestLogStyle, *, is_wanted: bool, is_logged: bool
) -> None:
    """And not at all with vLLM's own flag against it; the address stays as it is."""
    listen = ListenSettings(port=1, has_access_log=is_wanted)
    given = Settings(listen=listen, logs=LogSettings(requests=requests))
    assert given.uvicorn_listen == replace(listen, has_access_log=is_logged)


@pytest.mark.parametrize(
    "where", [(), ("--port", "1"), ("--port=2", "--host", "::1"), ("--uds=/tmp/a.sock",)]
)
def test_the_engine_is_the_same_wherever_it_is_reached(where: tuple[str, ...]) -> None:
    """What was learned under one port holds under another."""
    given = Settings(vllm_arguments=("model", *where, "--max-model-len", "8"))
    assert given.arguments_without_address == ("model", "--max-model-len", "8")
