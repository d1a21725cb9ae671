"""What only vLLM's own parser can tell, refused by us before an engine is configured."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cli import parse_serve
from holdfast.errors import UsageError

HEAD = ("-n", "2", "--master-addr=10.0.0.1", "--node-key-file=/key")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's parser sets a variable of its own, which ends with the test."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD")  # else forks are ruled out, for good
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def refused(*arguments: str) -> str:
    """The one line for a command line, of our parser or else of vLLM's."""
    from holdfast.engine.launch.arguments import parse

    with pytest.raises(UsageError) as caught:
        parse(parse_serve(arguments, {}))
    assert caught.value.remedy
    return caught.value.line


@pytest.mark.parametrize(
    ("abbreviation", "flag"),
    [
        ("--por=9000", "--port"),
        ("--host-memory-g=off", "--host-memory-guard"),
        ("--ud=/x", "--uds"),
        ("--api-key-f=/x", "--api-key-file"),
        ("--metrics-a=api-key", "--metrics-auth"),
        ("--ssl-certf=/x", "--ssl-certfile"),
        ('--allowed-o=["http://a"]', "--allowed-origins"),
        ('--allowed-met=["GET"]', "--allowed-methods"),
        ('--allowed-h=["x-one"]', "--allowed-headers"),
        ("--allow-c", "--allow-credentials"),
        ("--uvicorn-log=debug", "--uvicorn-log-level"),
        ("--enable-ssl-ref", "--enable-ssl-refresh"),
        ("--disable-uvicorn", "--disable-uvicorn-access-log"),
        ("--disable-access-log=/x", "--disable-access-log-for-endpoints"),
        ("--probe-tim=5", "--probe-timeout"),
        ("--workspace-res=1MiB", "--workspace-reserve"),
        ("--learned-d=none", "--learned-dir"),
        ("--dem", "--demo"),
        ("--nnode=2", "--nnodes"),
        ("--node-ra=1", "--node-rank"),
        ("--headl", "--headless"),
        ("--master-ad=10.0.0.1", "--master-addr"),
    ],
)
def test_an_abbreviation_of_what_we_read_is_refused(abbreviation: str, flag: str) -> None:
    """vLLM would go on with another value than ours, say another port than we listen on."""
    assert f"{flag} is abbreviated" in refused("model", abbreviation)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--bogus",), "--bogus"),
        (("--hos=::1",), "ambiguous option: --hos"),
        (("--max-model-len", "banana"), "--max-model-len"),
        (("-dph",), "--data-parallel-hybrid-lb"),
        (("-dpe",), "--data-parallel-external-lb"),
        (("-asc", "2"), "--api-server-count"),
        ((*HEAD, "-dp", "2"), "--nnodes 2 is not supported with --data-parallel-size 2"),
        (("-dp", "2", "-dpl", "1"), "--data-parallel-size-local 1"),
        (("--enable-elastic",), "--enable-elastic-ep"),
    ],
)
def test_what_vllm_does_not_take_is_refused(arguments: tuple[str, ...], named: str) -> None:
    """Unknown and wrong flags, and ours to refuse in their short forms."""
    assert named in refused("model", *arguments)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("--enable-auto-tool-choice", "--tool-call-parser=hermess"),
            "'hermess' is not a tool call parser. Remedy: did you mean hermes?",
        ),
        (
            ("--reasoning-parser=deepseek_r",),
            "'deepseek_r' is not a reasoning parser. Remedy: did you mean deepseek_r1?",
        ),
        (("--enable-auto-tool-choice",), "--enable-auto-tool-choice requires --tool-call-parser."),
    ],
)
def test_what_vllm_says_as_an_exception_is_one_sentence(
    arguments: tuple[str, ...], line: str
) -> None:
    """Without the name of the exception, and without a list of all the parsers that there are."""
    assert refused("model", *arguments).startswith(line)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--api-k=hush",), "ambiguous option: --api-k could match"),
        (("--apikey=hush", "--port=1"), "unrecognized arguments: --apikey."),
        (("--apikey", "hush"), "unrecognized arguments: --apikey, 1 word without a flag."),
        (("--api-key=right", "hush"), "unrecognized arguments: 1 word without a flag."),
    ],
)
def test_what_may_be_a_mistyped_key_is_not_shown(arguments: tuple[str, ...], named: str) -> None:
    """Flags that are unknown are named without what follows them."""
    line = refused("model", *arguments)
    assert named in line
    assert "hush" not in line


@pytest.mark.parametrize("arguments", [("--dtype", "auto"), ("--enforce-eager", "--seed", "1")])
def test_no_model_among_values_is_refused(arguments: tuple[str, ...]) -> None:
    """A value of a flag is not a model."""
    assert "no model was given" in refused(*arguments)


def test_a_model_after_flags_beside_the_demo_model_is_refused() -> None:
    """And so is a path, wherever it stands."""
    assert "serves its own model" in refused("--demo", "--dtype", "auto", "model")
    assert "there is no model at /no/such" in refused("--dtype", "auto", "/no/such")


def test_whole_flags_are_understood_alike() -> None:
    """Both parsers read the same from flags that are written in full."""
    from holdfast.engine.launch.arguments import parse

    given = ("model", "--port=9000", "--probe-timeout=5", "--host=::1", "--api-key", "a", "b")
    more = ("--uds=/x", "--log-level=DEBUG", "--root-path=/v/", '--allowed-origins=["http://a"]')
    logs = ("--disable-access-log-for-endpoints=/a, /b,", "--disable-uvicorn-access-log")
    settings = parse_serve([*given, *more, *logs, "--enable-ssl-refresh"], {})
    namespace = parse(settings)
    assert (namespace.model, namespace.port) == ("model", settings.listen.port)
    assert namespace.root_path == settings.listen.root_path == "/v"
    assert settings.listen.allowed_origins == tuple(namespace.allowed_origins) == ("http://a",)
    assert namespace.shutdown_timeout == 45


def test_aliases_are_understood_alike() -> None:
    """vLLM's parser gives them defaults, and ours none."""
    from holdfast.engine.launch.arguments import parse

    headers = ("--h11-max-header-count=7", "--h11_max_incomplete_event_size", "4096")
    settings = parse_serve(["model", *headers, "--shutdown-timeout=7"], {})
    assert (settings.limits.max_headers, settings.limits.max_header_bytes) == (7, 4096)
    assert parse(settings).shutdown_timeout == 7


@pytest.mark.parametrize("alias", ["--shutdown-time=7", "--h11-max-header-c=7"])
def test_an_abbreviated_alias_is_refused(alias: str) -> None:
    """As the flag is that it stands for."""
    assert "is abbreviated" in refused("model", alias)


def test_a_demo_model_that_cannot_be_kept_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk is full, a home cannot be written, or a file is in its place."""
    (tmp_path / "cache").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    line = refused("--demo")
    assert f"cannot be kept in {tmp_path}/cache/holdfast/models: Not a directory." in line
    assert "XDG_CACHE_HOME" in line


PLUGINS = {
    "tool": """
from vllm.tool_parsers import ToolParser, ToolParserManager
ToolParserManager.register_module("own_tool", module=type("Own", (ToolParser,), {}))
""",
    "reasoning": """
from vllm.reasoning import ReasoningParser, ReasoningParserManager
ReasoningParserManager.register_module("own_reasoning", module=type("Own", (ReasoningParser,), {}))
""",
}


def test_parsers_that_an_operator_has_written_are_known(tmp_path: Path) -> None:
    """As under `vllm serve`, which imports both files before it checks the names."""
    from vllm.parser import ParserManager

    from holdfast.engine.launch.arguments import parse

    for kind, code in PLUGINS.items():
        (tmp_path / f"own_{kind}_parser.py").write_text(code)
    plugins = [f"--{kind}-parser-plugin={tmp_path}/own_{kind}_parser.py" for kind in PLUGINS]
    named = ("--enable-auto-tool-choice", "--tool-call-parser=own_tool")
    parse(parse_serve(["model", *named, "--reasoning-parser=own_reasoning", *plugins], {}))
    assert ParserManager.get_tool_parser("own_tool", enable_auto_tools=True)
    assert ParserManager.get_reasoning_parser("own_reasoning")


def test_vllm_is_given_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The front door has checked it; vLLM would refuse what a file has made right since."""
    from holdfast.engine.launch.arguments import parse

    variables = {"HOLDFAST_ADMIN_API_KEY": "hush"}
    settings = parse_serve(["model", "--api-key", "hush", "hush-hush"], variables)
    monkeypatch.delenv("HOLDFAST_ADMIN_API_KEY", raising=False)
    assert "hush" not in str(parse(settings))
