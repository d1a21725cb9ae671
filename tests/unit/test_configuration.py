"""What `/statusz` says that was given to the server, and what it hides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast import __version__
from holdfast.cli import parse_serve
from holdfast.configuration import given, without_secrets
from holdfast.configuration_record import Configuration

HUSH = "hush"


def configured(*arguments: str, **environment: str) -> Configuration:
    """That of `holdfast serve --demo` with some more arguments and variables."""
    return given(parse_serve(["--demo", *arguments], environment), environment)


def test_flags_are_those_of_the_command_line_and_the_file(tmp_path: Path) -> None:
    """The file's come first, as when they are read."""
    path = tmp_path / "flags.yaml"
    path.write_text("max-model-len: 64\n")
    found = configured("--config", str(path), "--dtype=float32")
    given_flags = ("--demo", "--config", str(path), "--dtype=float32")
    assert found.flags == ("--max-model-len=64", *given_flags)


def test_versions_and_image_are_known_from_the_first_second() -> None:
    """The rest is not, before vLLM is there."""
    found = configured(HOLDFAST_IMAGE="registry/holdfast@sha256:0")
    assert found.image == "registry/holdfast@sha256:0"
    assert found.versions["holdfast"] == __version__
    assert set(found.versions) == {"holdfast", "vllm", "torch", "transformers", "python"}
    assert (found.fingerprint, found.model, found.files) == ("", "", ())


def test_variables_are_those_of_holdfast_and_vllm() -> None:
    """Others may be anything, or have no effect."""
    others = {
        "HOME": "/root",
        "HF_TOKEN": HUSH,
        "HOLDFAST_VERSION": "1",
        "HOLDFAST_PORT": "udp://a",
    }
    found = configured(VLLM_USE_V1="1", HOLDFAST_PROBE="quick", **others)
    assert found.variables == {"HOLDFAST_PROBE": "quick", "VLLM_USE_V1": "1"}


def test_no_key_is_told() -> None:
    """Whether a flag or a variable has it."""
    given_keys = ("--api-key", f"{HUSH}-first-key", f"{HUSH}-second-key")
    found = configured(
        *given_keys,
        f"--admin-api-key={HUSH}-admin-key",
        VLLM_API_KEY=f"{HUSH}-variable",
        HOLDFAST_ADMIN_API_KEY=f"{HUSH}-variable",
        VLLM_NEW_TOKEN=f"{HUSH}-variable",
    )
    assert HUSH not in repr(found)
    assert found.flags[:4] == ("--demo", "--api-key", "***", "***")
    assert set(found.variables) == {"VLLM_API_KEY", "HOLDFAST_ADMIN_API_KEY", "VLLM_NEW_TOKEN"}


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--hf-token", HUSH, "--port", "1"], ["--hf-token", "***", "--port", "1"]),
        ([f"--hf-token={HUSH}"], ["--hf-token=***"]),
        (["--x.extra.aws_secret", HUSH], ["--x.extra.aws_secret", "***"]),
        (["--otlp", f"http://ada:{HUSH}@host/"], ["--otlp", "http://***@host/"]),
        ([f"--url=http://host/?token={HUSH}&a=1"], ["--url=http://host/?token=***&a=1"]),
        (["--text", "hf_abcdefghijklmnop1234"], ["--text", "***"]),
        (["--config", '{"apiKey": "hush", "a": [{"token": 1}]}'], None),
        (["--max-num-batched-tokens", "4096"], ["--max-num-batched-tokens", "4096"]),
        (["--long-prefill-token-threshold=4"], ["--long-prefill-token-threshold=4"]),
        (["--tokenizer", "org/name", "--api-key-file", "/k"], None),
        (["--x", '{"a":1}', "[broken", "{"], ["--x", '{"a":1}', "[broken", "{"]),
        (["--chat-template", "x" * 3000], ["--chat-template", "x" * 2000 + "..."]),
    ],
)
def test_a_secret_is_known_by_its_name_or_form(
    arguments: list[str], shown: list[str] | None
) -> None:
    """And what only resembles one is told."""
    found = list(without_secrets(arguments))
    assert HUSH not in " ".join(found)
    if shown is not None:
        assert found == shown


def test_a_document_keeps_what_is_not_secret() -> None:
    """Only the values of secret names are masked, however deep they stand."""
    document = {"kv_connector": "x", "extra": [{"access-key": "hush", "port": 1}]}
    _, found = without_secrets(["--kv-transfer-config", json.dumps(document)])
    assert json.loads(found) == {"kv_connector": "x", "extra": [{"access-key": "***", "port": 1}]}


@pytest.mark.parametrize(
    "content",
    [
        "kv-transfer-config: {extra: {access-key: hush, since: 2026-11-23}}",
        "kv-transfer-config: {access-key: hush, 2026-11-23: x}",
        "x: [{access-key: hush}]",
    ],
)
def test_a_nested_value_of_the_file_is_a_document(tmp_path: Path, content: str) -> None:
    """Whatever YAML has in it: vLLM takes it as JSON, and what is secret in it is masked."""
    path = tmp_path / "flags.yaml"
    path.write_text(content)
    found = configured("--config", str(path))
    assert HUSH not in repr(found)
    assert '"access-key": "***"' in " ".join(found.flags)


def test_the_path_of_a_key_file_is_not_secret() -> None:
    """It tells an operator where to look."""
    assert list(without_secrets(["--api-key-file", "/keys"])) == ["--api-key-file", "/keys"]
