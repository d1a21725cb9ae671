"""What the system shows of a process that was started with keys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from holdfast import hide_keys
from holdfast.hide_keys import masked
from holdfast.settings import ListenSettings, Settings

KEYS = ["hush-flag-1", "hush-flag=2", "hush-admin", "hush-variable"]
ARGUMENTS = ["--demo", "--api-key", "hush-flag-1", "hush-flag=2", "--admin-api-key=hush-admin"]
PROGRAM = """
import json, os, pathlib, subprocess, sys
from holdfast.cli import parse_serve
from holdfast.hide_keys import hide_keys

hide_keys(parse_serve(sys.argv[1:], os.environ).given_keys)
shown = {
    part: pathlib.Path("/proc/self", part).read_bytes().decode("latin-1").strip("\\0")
    for part in ("cmdline", "environ")
}
child = [sys.executable, "-c", "import os; print(dict(os.environ))"]
shown["child"] = subprocess.run(child, capture_output=True, text=True, check=True).stdout
print(json.dumps({**shown, "argv": sys.argv}))
"""


def _shown(arguments: list[str], **variables: str) -> dict[str, Any]:
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environment,
    )
    assert done.stderr == ""
    shown: dict[str, Any] = json.loads(done.stdout)
    return shown


def test_keys_are_in_no_title_no_environment_and_no_child() -> None:
    """Given as flags and as variables, which of the two counts or not."""
    variables = {"VLLM_API_KEY": "hush-variable", "HOLDFAST_ADMIN_API_KEY": "hush-variable"}
    shown = _shown(ARGUMENTS, **variables, KEPT="kept")
    assert "hush" not in json.dumps(shown)
    words = ["--demo", "--api-key", "*" * 11, "*" * 11, "--admin-api-key=" + "*" * 10]
    assert shown["cmdline"].endswith("\0".join(words))
    assert shown["argv"][1:] == ["--demo", "--api-key", "***", "***", "--admin-api-key=***"]
    assert "VLLM_API_KEY=" + "*" * 13 in shown["environ"].split("\0")
    assert "API_KEY" not in shown["child"]


def test_what_is_no_key_stays() -> None:
    """Other words and variables, here and in children, those with the value of a key too."""
    shown = _shown(ARGUMENTS, KEPT="kept", SAME="same", VLLM_API_KEY="same")
    assert {"KEPT=kept", "SAME=same"} <= set(shown["environ"].split("\0"))
    assert "'KEPT': 'kept'" in shown["child"]
    assert "'SAME': 'same'" in shown["child"]


def test_a_process_without_keys_is_left_as_it_is() -> None:
    """Its arguments and its environment can be read as ever."""
    shown = _shown(["--demo", "--api-key-file=/x"], KEPT="kept")
    assert shown["cmdline"].endswith("--demo\0--api-key-file=/x")
    assert "KEPT=kept" in shown["environ"]


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("hush-flag=2", "***"),
        ("--api-key=hush-flag=2", "--api-key=***"),
        ("--model=hush-flag-1-large", "--model=hush-flag-1-large"),
        ("--api-key=", "--api-key="),
        ("", ""),
    ],
)
def test_a_key_is_masked_as_a_whole_word(argument: str, shown: str) -> None:
    """Alone, or after the first equals sign; what only contains it stays."""
    assert masked([argument], KEYS) == [shown]


@pytest.mark.parametrize(
    ("listen", "is_open"),
    [
        ({"host": ""}, True),
        ({"host": "192.0.2.7"}, True),
        ({"host": "server.example"}, True),
        ({"host": "127.0.0.2"}, False),
        ({"host": "::1"}, False),
        ({"host": "localhost"}, False),
        ({"host": "", "uds": "/run/server.sock"}, False),
        ({"host": "", "api_keys": ("key",)}, False),
        ({"host": "", "ssl_cert_reqs": 2}, False),
    ],
)
def test_whether_a_listener_is_open_without_a_key(listen: dict[str, Any], *, is_open: bool) -> None:
    """Nobody where a key or a certificate is asked for, or only this machine reaches the server."""
    door = hide_keys.open_access(Settings(listen=ListenSettings(**listen)))
    assert (door is not None) is is_open
