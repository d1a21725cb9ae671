"""The command line as it is read before vLLM is imported: settings, or one clear error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast import __version__, cli
from holdfast.cli import parse_serve
from holdfast.engine import unsupported
from holdfast.errors import HoldfastError, PluginMissingError, UsageError
from holdfast.settings import Settings
from holdfast.settings.variable_names import check_rest

NO_VARIABLES: dict[str, str] = {}


def read(*arguments: str) -> Settings:
    """What `holdfast serve --demo` makes of some more arguments."""
    return parse_serve(["--demo", *arguments], NO_VARIABLES)


def refused(*arguments: str) -> str:
    """The one line that a wrong command line gets."""
    with pytest.raises(UsageError) as caught:
        parse_serve(arguments, NO_VARIABLES)
    assert caught.value.remedy
    return caught.value.line


def config(directory: Path, content: str | bytes, name: str = "flags.yaml") -> str:
    """A `--config` file."""
    path = directory / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


# Flags


def test_ours_are_read_among_those_of_vllm() -> None:
    """vLLM's stay untouched, in their order, for its own parser."""
    arguments = ("model", "--max-model-len", "64", "--probe", "quick", "-tp=2", "--port=7")
    understood = parse_serve(arguments, NO_VARIABLES)
    assert (understood.probe.suite, understood.listen.port) == ("quick", 7)
    assert understood.vllm_arguments == arguments


def test_underscores_are_dashes() -> None:
    """As in vLLM's parser; what follows the name is left alone."""
    understood = read("--learned_dir=/a_b", "--workspace_reserve", "1MiB")
    assert understood.workspace.learned_directory == Path("/a_b")
    assert understood.workspace.reserve_bytes == 1 << 20


@pytest.mark.parametrize("abbreviation", ["--workspace-res=1MiB", "--prob=off", "--drain", "--dem"])
def test_an_abbreviation_is_not_understood(abbreviation: str) -> None:
    """It could be a flag of vLLM's; vLLM's parser, which completes it, decides later."""
    assert read(abbreviation).workspace == Settings().workspace
    assert read(abbreviation).probe == Settings().probe


@pytest.mark.parametrize(
    "arguments",
    [
        ("--port", "65536"),
        ("--port=-1"),
        ("--port", "http"),
        ("--port",),
        ("--ssl-cert-reqs", "3"),
        ("--ssl-keyfile", "key.pem"),
        ("--uvicorn-log-level", "loud"),
        ("--log-level", "loud"),
        ("--root-path", "v2"),
        ("--allowed-origins", "https://chat.example.com"),
        ("--allowed-origins", '"*"'),
        ("--allowed-origins", "[1]"),
        ("--host", "a\0b"),
        ("--uds", "a\0b"),
        ("--demo=yes"),
        ("--probe", "thorough"),
        ("--workspace-headroom", "nan"),
        ("--api-server-count", "two"),
    ],
)
def test_a_wrong_value_is_refused(arguments: tuple[str, ...] | str) -> None:
    """The line names the flag."""
    given = (arguments,) if isinstance(arguments, str) else arguments
    assert given[0].partition("=")[0] in refused("--demo", *given)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--grpc",),
        ("--headless",),
        ("--data-parallel-external-lb",),
        ("--data_parallel_external_lb",),
        ("--data-parallel-rank", "0"),
        ("--data-parallel-hybrid-lb",),
        ("--data-parallel-start-rank=1",),
        ("--data-parallel-multi-port-external-lb",),
        ("--api-server-count", "2"),
        ("--api-server-count=0",),
        ("--data-parallel-size-local=1", "--data-parallel-size=2"),
        ("--data-parallel-size-local=0",),
        ("--enable-elastic-ep",),
        ("--enable-fault-tolerance",),
    ],
)
def test_what_we_cannot_do_is_refused_at_once(arguments: tuple[str, ...]) -> None:
    """With the reason, and before anything is started."""
    flag = arguments[0].partition("=")[0].replace("_", "-")
    line = refused("--demo", *arguments)
    assert line.startswith(flag)
    assert "not supported" in line


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (("-dpe",), "--data-parallel-external-lb"),
        (("-dpn", "0"), "--data-parallel-rank"),
        (("-dph",), "--data-parallel-hybrid-lb"),
        (("-dpr=1",), "--data-parallel-start-rank"),
        (("-dpm",), "--data-parallel-multi-port-external-lb"),
        (("-asc", "2"), "--api-server-count 2"),
        (("-dpl=1", "-dp=2"), "--data-parallel-size-local 1"),
        (("-n", "2", "-dpb", "ray"), "--nnodes 2 is not supported with Ray"),
    ],
)
def test_short_forms_of_vllm_are_refused_too(arguments: tuple[str, ...], flag: str) -> None:
    """The line names the long form."""
    assert refused("--demo", *arguments).startswith(flag)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--api-server-count", "1"),
        ("-dp", "2", "-dpl", "2", "-asc", "1", "-dpa", "10.0.0.1", "-dpp", "29550"),
        ("--nnodes", "1"),
        ("--data-parallel-size", "2"),
        ("--data-parallel-size-local", "2", "--data-parallel-size", "2"),
        ("--no-enable-elastic-ep",),
        ("--no-enable-fault-tolerance",),
    ],
)
def test_what_changes_nothing_is_accepted(arguments: tuple[str, ...]) -> None:
    """One front end, one node that has all replicas, an engine of one size."""
    assert read(*arguments).is_demo


# The model


@pytest.mark.parametrize("path", ["/no/such/model", "./no-such-model", "../no-such-model"])
def test_a_path_without_a_model_is_refused_at_once(path: str) -> None:
    """vLLM would take it for a name on the Hub, and say so after many seconds."""
    assert "there is no model at" in refused(path)
    assert "there is no model at" in refused("--model", path)


@pytest.mark.parametrize(
    "arguments",
    [
        ("model", "--demo"),
        ("--demo", "--model=model"),
        ("--demo", "owner/model"),
        ("--demo", "--port=0", "owner/model", "--enforce-eager"),
    ],
)
def test_a_model_beside_the_demo_model_is_refused(arguments: tuple[str, ...]) -> None:
    """Nobody has to guess which one is served."""
    assert "serves its own model" in refused(*arguments)


@pytest.mark.parametrize("arguments", [(), ("--port=1",), ("--probe", "off", "--enforce-eager")])
def test_no_model_is_refused_at_once(arguments: tuple[str, ...]) -> None:
    """Where no argument can be one."""
    assert "no model was given" in refused(*arguments)


def test_a_model_may_follow_the_flags() -> None:
    """Which of two words is the model and which a value, vLLM's parser knows."""
    assert parse_serve(["--dtype", "auto", "model"], NO_VARIABLES).vllm_arguments[-1] == "model"


def test_no_proof_is_never_the_full_one() -> None:
    """The start used to end after vLLM's import, with exit 4 and advice to raise the time."""
    line = refused("--demo", "--probe=off", "--probe-require-full")
    assert line.endswith("cannot hold. Remedy: leave out one of them.")
    assert parse_serve(["--demo", "--probe=quick", "--probe-require-full"], {}).probe.requires_full


# The file


def test_a_file_stands_in_for_flags(tmp_path: Path) -> None:
    """Switches, lists, numbers, and names with underscores; a flag wins."""
    file = config(
        tmp_path,
        "port: 7\nprobe_timeout: 9\ndemo: true\nprobe-require-full: false\napi-key: [a, b]\n"
        "log-format: json\nmax-model-len: 64\n",
    )
    understood = parse_serve(["--config", file, "--log-format=console"], NO_VARIABLES)
    assert understood.is_demo
    assert (understood.listen.port, understood.listen.api_keys) == (7, ("a", "b"))
    assert (understood.probe.timeout_seconds, understood.probe.requires_full) == (9.0, False)
    assert understood.logs.format == "console"


def test_the_file_may_be_named_with_an_equals_sign(tmp_path: Path) -> None:
    """vLLM ignores such a file silently, so its parser is given the other form."""
    file = config(tmp_path, "port: 7")
    understood = read(f"--config={file}")
    assert understood.listen.port == 7
    assert understood.vllm_arguments == ("--demo", "--config", file)


def test_a_model_in_the_file_is_checked(tmp_path: Path) -> None:
    """Like one on the command line."""
    assert "there is no model at" in refused("--config", config(tmp_path, "model: /no/such"))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "must contain a mapping"),
        ("- a\n- b\n", "must contain a mapping"),
        ("just words", "must contain a mapping"),
        ("port: [", "not YAML"),
        ("a: b: c", "not YAML"),
        ("? [a]\n: b", "not YAML"),
        ("port: !!int seven", "not YAML"),
        ("!!python/object:os.system x: 1", "not YAML"),
        (b"\xff\xfe\x00\x80", "not YAML"),
        (b"port: 1\x00", "not YAML"),
        ("[" * 5000, "not YAML"),
        ("port: 99999999", "--port"),
        ("port: [1, 2, 3]\ngrpc: true", "--grpc"),
        ("workspace-reserve: {a: b}", "--workspace-reserve"),
        ("probe: off", "quote it"),
        ("probe_timeout: null", "it has no value"),
        ("learned-dir: ~", 'quote a word such as "~"'),
        ("api-key:", "leave the line out"),
        ("demo:", "leave the line out"),
        ("master_addr:", "leave the line out"),
        ("admit-unproven:", "leave the line out"),
        ('learned-dir: "a\\0b"', "--learned-dir"),
        ('uds: "a\\0b"', "--uds"),
        ("headless: true", "--headless"),
        ("ui: on", 'quote it, for example ui: "on"'),
        ("continue_streams: on", 'continue_streams: "on"'),
        ("host-memory-guard: yes", 'host-memory-guard: "on"'),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, content: str | bytes, named: str) -> None:
    """The line says what is wrong with it."""
    assert named in refused("--demo", "--config", config(tmp_path, content))


def test_what_vllm_reads_as_absent_may_have_no_value(tmp_path: Path) -> None:
    """A flag that takes None as a value, and an address that is empty by default."""
    assert read("--config", config(tmp_path, "quantization:\nhost:\n")).listen.host == ""


def test_a_file_cannot_switch_off_what_a_variable_switches_on(tmp_path: Path) -> None:
    """A switch has no flag that means no; the line would be dropped."""
    given = ["--demo", "--config", config(tmp_path, "admit_unproven: false")]
    for variables in ({}, {"HOLDFAST_ADMIT_UNPROVEN": "0"}):
        assert not parse_serve(given, variables).probe.lifts_proven_length
    with pytest.raises(UsageError, match=r"admit_unproven: .* HOLDFAST_ADMIT_UNPROVEN") as caught:
        parse_serve(given, {"HOLDFAST_ADMIT_UNPROVEN": "1"})
    assert "unset HOLDFAST_ADMIT_UNPROVEN" in caught.value.remedy


def test_keys_at_the_end_of_a_file_do_not_take_the_model(tmp_path: Path) -> None:
    """Where the model comes first, the flags of the file come after it."""
    file = config(tmp_path, "port: 7\napi-key: [a, b]\n")
    assert parse_serve(["model", "--config", file], NO_VARIABLES).listen.api_keys == ("a", "b")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """Missing, a directory, without a name, of another kind, twice."""
    directory = tmp_path / "directory.yaml"
    directory.mkdir()
    file = config(tmp_path, "port: 7")
    assert "No such file" in refused("--demo", "--config", str(tmp_path / "none.yaml"))
    assert "Is a directory" in refused("--demo", "--config", str(directory))
    assert "one argument" in refused("--demo", "--config")
    assert ".yaml" in refused("--demo", "--config", config(tmp_path, "port: 7", "flags.txt"))
    assert "more than once" in refused("--demo", "--config", file, f"--config={file}")


# The environment


@pytest.mark.parametrize("plugins", ["", "other", "holdfast_demo", "holdfast2"])
def test_plugins_without_ours_are_refused_at_once(plugins: str) -> None:
    """No rank would report: exit 3, with the variable and what it lacks."""
    with pytest.raises(PluginMissingError, match="leaves out holdfast") as caught:
        parse_serve(["model"], {"VLLM_PLUGINS": plugins})
    assert caught.value.exit_code == 3


def test_plugins_with_ours_are_accepted() -> None:
    """Beside others; the demo model needs its own too."""
    assert not parse_serve(["model"], {"VLLM_PLUGINS": "other,holdfast"}).is_demo
    assert parse_serve(["--demo"], {"VLLM_PLUGINS": "holdfast,holdfast_demo"}).is_demo
    with pytest.raises(PluginMissingError, match="leaves out holdfast_demo"):
        parse_serve(["--demo"], {"VLLM_PLUGINS": "holdfast"})


def test_a_startup_plan_is_refused_at_once() -> None:
    """It would size the KV cache without the reservations."""
    with pytest.raises(UsageError, match="VLLM_ENABLE_STARTUP_PLAN"):
        parse_serve(["--demo"], {"VLLM_ENABLE_STARTUP_PLAN": "1"})
    assert parse_serve(["--demo"], {"VLLM_ENABLE_STARTUP_PLAN": "0"}).is_demo


@pytest.mark.parametrize("flag", ["--distributed-executor-backend", "--data-parallel-backend"])
def test_the_older_executor_of_ray_is_refused_at_once(flag: str) -> None:
    """It calls the model past the worker, so that the probe would see no step."""
    older = {"VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "0"}
    with pytest.raises(UsageError, match="VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0 is not supported"):
        parse_serve(["--demo", flag, "ray"], older)
    assert parse_serve(["--demo", flag, "mp"], older).is_demo
    assert parse_serve(["--demo", flag, "ray"], NO_VARIABLES).is_demo


def test_the_api_key_may_stand_in_the_environment() -> None:
    """As in vLLM; those on the command line win, and an empty variable is none."""
    variables = {"VLLM_API_KEY": "a"}
    assert parse_serve(["--demo"], variables).listen.api_keys == ("a",)
    assert parse_serve(["--demo", "--api-key", "b"], variables).listen.api_keys == ("b",)
    assert parse_serve(["--demo"], {"VLLM_API_KEY": ""}).listen.api_keys == ()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--api-key",),
        ("--api-key", ""),
        ("--api-key", "right", "hush hush"),
        ("--api-key=hush\n",),
        ("--admin-api-key=hush hush",),
        ("--admin-api-key=",),
    ],
)
def test_a_wrong_key_is_refused_and_not_shown(arguments: tuple[str, ...]) -> None:
    """An empty variable of a shell may not open the server; the line names the flag alone."""
    line = refused("--demo", *arguments)
    assert line.startswith(f"{arguments[0].partition('=')[0]}: expected a key")
    assert "hush" not in line


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--api-key", "hush", "--api-key", "other"), "--api-key"),
        (("--api-key=hush", "--api_key=hush"), "--api-key"),
        (("--admin-api-key=hush", "--admin_api_key", "other"), "--admin-api-key"),
    ],
)
def test_a_flag_of_keys_that_is_repeated_is_refused(arguments: tuple[str, ...], named: str) -> None:
    """The last would replace the others without a word, and `ps` would show those."""
    line = refused("--demo", *arguments)
    assert line.startswith(f"{named}: given more than once.")
    assert f"{named}-file" in line
    assert "hush" not in line


def test_a_key_of_the_command_line_replaces_those_of_a_file(tmp_path: Path) -> None:
    """As any other flag does."""
    file = config(tmp_path, "api-key: [a, b]\nadmin-api-key: c")
    found = read("--config", file, "--api-key=d", "--admin-api-key=e")
    assert found.given_keys == ("d", "e")


@pytest.mark.parametrize(
    "content",
    [
        "api-key: [hush",
        "api-key: *hush",
        "api-key: !hush x",
        "api-key: !!bool hush",
        'api-key: !!int ""',
        'api-key: !!float ""',
        f"api-key: !!float 1{':1' * 200}",
        f"api-key: 0x{'f' * 4000}",
    ],
)
def test_a_broken_file_is_refused_and_not_quoted(tmp_path: Path, content: str) -> None:
    """A key may stand in the line that is wrong."""
    line = refused("--demo", "--config", config(tmp_path, content))
    assert "not YAML, see line 1" in line
    assert "hush" not in line


# Anything at all

_NAMES = st.sampled_from(
    ["--config", "--port", "--host", "--uds", "--probe", "--workspace-reserve", "--learned-dir",
     "--api-key", "--demo", "--root-path", "--ssl-cert-reqs", "--model", "--grpc", "--", "-"]
)  # fmt: skip
_WORDS = st.one_of(
    _NAMES, st.text(), st.builds("{}={}".format, _NAMES, st.text()), st.integers().map(str)
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@settings(deadline=None)
@given(st.lists(_WORDS).filter(lambda words: not {"-h", "--help"} & set(words)))
def test_any_words_are_settings_or_one_of_our_errors(words: list[str]) -> None:
    """Nothing that is typed ends in another way."""
    try:
        parse_serve(words, NO_VARIABLES)
    except HoldfastError as error:
        assert len(error.line.splitlines()) == 1  # noqa: PT017 - either outcome is right


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary() | st.text(max_size=40).map(str.encode))
def test_any_bytes_are_a_file_or_one_of_our_errors(tmp_path: Path, content: bytes) -> None:
    """Nothing that is written in the file ends in another way."""
    try:
        read("--config", config(tmp_path, content))
    except HoldfastError as error:
        assert error.remedy  # noqa: PT017 - either outcome is right


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(_NAMES.map(lambda name: name[2:]) | st.text(), _VALUES))
def test_any_mapping_is_a_file_or_one_of_our_errors(
    tmp_path: Path, content: dict[str, object]
) -> None:
    """Whatever values YAML knows, under our names."""
    import yaml

    content.pop("help", None)
    try:
        read("--config", config(tmp_path, yaml.safe_dump(content)))
    except HoldfastError as error:
        assert error.remedy  # noqa: PT017 - either outcome is right


# The process


def holdfast(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "holdfast", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_failure_is_one_line_on_standard_error() -> None:
    """Cause and remedy, and nothing else anywhere."""
    ended = holdfast("serve", "--demo", "--port=http")
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr == (
        "holdfast: error: --port: http is not a port. Remedy: use 0 to 65535.\n"
    )
    assert ended.stderr.count("\n") == 1


def test_the_last_line_commands_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A failure may quote an engine, which may quote a client."""
    assert cli._fail("the engine said \x1b]0;owned\x07", 5) == 5
    assert capsys.readouterr().err == "holdfast: error: the engine said \\x1b]0;owned\\x07\n"


def test_a_mistyped_command_is_told_what_is_meant() -> None:
    """Rather than to read the help."""
    for mistyped, remedy in (("serv", "did you mean serve?"), ("x", "see `holdfast --help`.")):
        with pytest.raises(UsageError, match=f"invalid choice: '{mistyped}'") as caught:
            cli._command([mistyped])
        assert caught.value.remedy.startswith(remedy)


@pytest.mark.parametrize("text", ["10m", "ten", "1h"])
def test_a_time_is_told_how_to_be_written(text: str) -> None:
    """A number of seconds."""
    assert "expected a number of seconds, for example 600" in refused(
        "--demo", f"--probe-timeout={text}"
    )


def test_a_command_that_is_interrupted_has_not_succeeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exit code is that of SIGINT: nobody may read that nothing was found."""

    def interrupt(_arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(cli._OTHER_COMMANDS, "doctor", interrupt)
    assert cli._run(["doctor"]) == 130


@pytest.mark.parametrize("command", ["plan", "health"])
def test_a_command_that_reads_the_flags_of_serve_ends_as_serve_does(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Without our plugin no engine could start, which is exit 3 everywhere."""
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    ended = holdfast(command, "--demo")
    assert (ended.returncode, ended.stdout) == (3, "")
    assert "leaves out holdfast" in ended.stderr


@pytest.mark.parametrize("arguments", [(), ("reserve",), ("--serve",), ("version", "now")])
def test_an_unknown_command_is_bad_usage(arguments: tuple[str, ...]) -> None:
    """Exit 2, with the way to the help."""
    ended = holdfast(*arguments)
    assert ended.returncode == 2
    assert ended.stderr.startswith("holdfast: error: ")
    assert "--help" in ended.stderr


def test_help_shows_our_flags_and_the_exit_codes() -> None:
    """And what it refuses is not offered."""
    ended = holdfast("serve", "--help")
    assert ended.returncode == 0
    assert "--workspace-reserve" in ended.stdout
    assert "6 address in use" in ended.stdout
    assert "--grpc" not in ended.stdout


def test_version_names_all_three() -> None:
    """Ours, vLLM's and torch's, without importing them."""
    ended = holdfast("version")
    assert [line.split()[0] for line in ended.stdout.splitlines()] == ["holdfast", "vllm", "torch"]
    assert __version__ in ended.stdout
    assert ended.stderr == ""


def test_vllms_limits_of_headers_are_ours() -> None:
    """They have no effect with the parser that we use; what was meant by them holds."""
    given = ["--demo", "--h11-max-header-count=7", "--h11_max_incomplete_event_size", "4096"]
    limits = parse_serve(given, {"HOLDFAST_MAX_HEADERS": "9"}).limits
    assert (limits.max_headers, limits.max_header_bytes) == (7, 4096)
    assert parse_serve([*given, "--max-headers=8"], {}).limits.max_headers == 8


def test_vllms_shutdown_timeout_is_the_drain() -> None:
    """It means the same; our flag overrides it, and both override the variable."""
    variables = {"HOLDFAST_DRAIN_TIMEOUT": "9"}
    for more, seconds in (((), 9), (("--shutdown-timeout=7",), 7)):
        found = parse_serve(["--demo", *more], variables)
        assert found.supervision.drain_timeout_seconds == seconds
    both = read("--shutdown_timeout", "7", "--drain-timeout=8")
    assert both.supervision.drain_timeout_seconds == 8


def test_vllms_keep_alive_is_the_default_of_ours() -> None:
    """A variable that is not a time is refused by name."""
    assert parse_serve(["--demo"], {}).listen.keep_alive_seconds == 5
    environment = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75"}
    assert parse_serve(["--demo"], environment).listen.keep_alive_seconds == 75
    with pytest.raises(UsageError, match="VLLM_HTTP_TIMEOUT_KEEP_ALIVE"):
        parse_serve(["--demo"], {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "long"})


@pytest.mark.parametrize("mistyped", ["--drain-timout=5", "--probe_timeuot", "--api-keyfile=x"])
def test_a_mistyped_flag_of_ours_is_told_at_once(mistyped: str) -> None:
    """Without vLLM's parser, which takes seconds to import."""
    line = refused("model", mistyped)
    assert mistyped.partition("=")[0].replace("_", "-") in line
    assert "did you mean --" in line


@pytest.mark.parametrize(
    ("mistyped", "meant"),
    [
        ("HOLDFAST_API_KEY", "VLLM_API_KEY"),
        ("HOLDFAST_DRAIN_TIMOUT", "HOLDFAST_DRAIN_TIMEOUT"),
        ("HOLDFAST_ADMIN_APIKEY", "HOLDFAST_ADMIN_API_KEY"),
        ("HOLDFAST_API_KEYS", "VLLM_API_KEY"),
        ("HOLDFAST_ADMIN_KEY", "HOLDFAST_ADMIN_API_KEY"),
        ("HOLDFAST_ADMIN_TOKEN", "HOLDFAST_ADMIN_API_KEY"),
        ("HOLDFAST_KEY_FILE", "HOLDFAST_API_KEY_FILE"),
        ("HOLDFAST_KEY", "VLLM_API_KEY"),
        ("HOLDFAST_NODE_KEY", "HOLDFAST_NODE_KEY_FILE"),
        ("HOLDFAST_SSL_KEY", "--ssl-keyfile"),
        ("HOLDFAST_KEYFILE", "HOLDFAST_API_KEY_FILE"),
        ("HOLDFAST_API_TOKEN", "VLLM_API_KEY"),
        ("HOLDFAST_API_TOKEN_FILE", "HOLDFAST_API_KEY_FILE"),
        ("HOLDFAST_API_KEY_FILE_NAME", "HOLDFAST_API_KEY_FILE"),
        ("HOLDFAST_APITOKEN", "VLLM_API_KEY"),
        ("HOLDFAST_PASSWORD", "VLLM_API_KEY"),
        ("HOLDFAST_TOKEN_FILE", "HOLDFAST_API_KEY_FILE"),
        ("HOLDFAST_AUTHKEY", "VLLM_API_KEY"),
        ("HOLDFAST_SSLKEY", "--ssl-keyfile"),
        ("HOLDFAST_TLS_KEYFILE", "--ssl-keyfile"),
        ("HOLDFAST_NODEKEY", "HOLDFAST_NODE_KEY_FILE"),
        ("HOLDFAST_HOST", "--host"),
        ("HOLDFAST_PORT", "--port"),
        ("HOLDFAST_SSL_KEYFILE", "--ssl-keyfile"),
        ("HOLDFAST_NNODES", "--nnodes"),
        ("VLLM_API_KEYS", "VLLM_API_KEY"),
        ("VLLM_APIKEY", "VLLM_API_KEY"),
        ("VLLM_KEY", "VLLM_API_KEY"),
    ],
)
def test_a_mistyped_variable_of_ours_is_refused(mistyped: str, meant: str) -> None:
    """Its value would be dropped, and is not shown; empty, it is not set."""
    with pytest.raises(UsageError, match=mistyped) as caught:
        parse_serve(["--demo"], {mistyped: "secret"})
    assert meant in caught.value.remedy
    assert "secret" not in caught.value.line
    parse_serve(["--demo"], {mistyped: ""})


FILES_OF_KEYS = "HOLDFAST_API_KEY_FILE or HOLDFAST_ADMIN_API_KEY_FILE"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("API_KEYS_PATH", f"set {FILES_OF_KEYS} if it is to guard this server"),
        ("KEY_DIRECTORY", f"set {FILES_OF_KEYS} if it is to guard this server"),
        ("ADMIN_API_KEY_PATH", "set HOLDFAST_ADMIN_API_KEY_FILE if that was meant"),
        ("ADMIN_SECRETS_DIR", "set HOLDFAST_ADMIN_API_KEY_FILE if it is to guard this server"),
        ("LICENSE_KEY", "set VLLM_API_KEY or HOLDFAST_ADMIN_API_KEY if it is to guard this server"),
        ("ADMIN_TOKEN", "set HOLDFAST_ADMIN_API_KEY if it is to guard this server"),
        ("ADMIN_SECRET_FILE", "set HOLDFAST_ADMIN_API_KEY_FILE if it is to guard this server"),
        ("SSL_KEY_PASSWORD", "use --ssl-keyfile if it is the key of TLS"),
        ("TLS_KEY_PATH", "use --ssl-keyfile if it is the key of TLS"),
    ],
)
def test_no_path_and_no_other_secret_becomes_a_key(name: str, remedy: str) -> None:
    """An operator who follows the advice must not give it to every client."""
    with pytest.raises(UsageError) as caught:
        parse_serve(["--demo"], {f"HOLDFAST_{name}": "x"})
    assert caught.value.remedy == f"{remedy}, or unset it."


def test_variables_that_are_not_of_flags_are_left_alone() -> None:
    """Those of Services whose names begin with `holdfast`, in their namespace, and our own."""
    names = ("PORT", "NODES_PORT", "PORT_8000_TCP", "ADMIN_PORT", "API_KEY_PORT_80_TCP")
    service = dict.fromkeys(names, "tcp://a:1")
    service |= dict.fromkeys(("PORT_8000_TCP_ADDR", "SERVICE_HOST", "ADMIN_SERVICE_HOST"), "::1")
    service |= dict.fromkeys(("SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_80_UDP_PORT"), "80")
    others = dict.fromkeys(("IMAGE", "HEAD_DRAIN_TIMEOUT", "EXIT_CODES", "PARENT_PID"), "1")
    own = dict.fromkeys(("WORKSPACE_SPEC", "OPERATORS_TMPDIR", "GPU_CHECK_EVENTS"), "1")
    environment = {
        f"HOLDFAST_{name}": value for name, value in {**service, **others, **own}.items()
    }
    of_clients = ("VLLM_API_BASE", "VLLM_API_URL", "VLLM_API_TYPE", "VLLM_CACHE_KEY")
    environment |= dict.fromkeys(of_clients, "1")
    assert parse_serve(["--demo"], environment) == parse_serve(["--demo"], {})


def test_a_variable_named_like_a_flag_of_vllm_is_refused() -> None:
    """Once vLLM's parser is there, which alone knows its flags."""
    known = ("--max-model-len", "--load-format")
    for name, remedy in (
        ("MAX_MODEL_LEN", "use --max-model-len."),
        ("LOAD_FORMAT", "use --load-format."),
    ):
        environment = {f"HOLDFAST_{name}": "1"}
        parse_serve(["--demo"], environment)
        with pytest.raises(UsageError, match=f"HOLDFAST_{name} has no effect") as caught:
            check_rest(environment, known)
        assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("VERSION", ""),
        ("MAX_TOKENS", ""),
        ("API_ENV", ""),
        ("API_KEY_SECRET_NAME", ""),
        ("SSL_CERT_FILE", ""),
        ("KEYCLOAK_URL", ""),
        ("ADMIN_EMAIL", ""),
        ("NODE_IP", ""),
        ("POD_NAME", "HOLDFAST_NODE_NAME"),
        ("MAX_WAIT", "HOLDFAST_MAX_WAITING"),
        ("STATE_DIR", "HOLDFAST_USAGE_DIR"),
        ("TIMEOUT", "HOLDFAST_SEND_TIMEOUT"),
    ],
)
def test_a_variable_that_may_have_another_purpose_is_a_warning(
    caplog: pytest.LogCaptureFixture, name: str, advice: str
) -> None:
    """A file of variables may serve other programs too; what it resembles is named."""
    named = f"HOLDFAST_{name}"
    environment = {named: "1", "HOLDFAST_PROBE": "off", "HOLDFAST_PORT": "udp://a:1"}
    parse_serve(["--demo"], environment)
    check_rest(environment, ())
    (line,) = caplog.messages
    assert f"{named} has no effect" in line
    assert advice in line


def test_the_programs_of_our_environment_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After all others, also if it is not activated, as in a unit of systemd."""
    ours = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", str(tmp_path))
    for _ in range(2):
        cli._run(["version"])
        assert os.environ["PATH"].split(os.pathsep) == [str(tmp_path), ours]
    monkeypatch.delenv("PATH")
    cli._run(["version"])
    assert os.environ["PATH"].split(os.pathsep) == [*os.defpath.split(os.pathsep), ours]


def test_vllms_empty_variables_are_not_set(tmp_path: Path) -> None:
    """As Compose hands on what is not set; of the plugins empty means none."""
    environment = {"VLLM_CPU_KVCACHE_SPACE": "", "VLLM_PLUGINS": "", "OTHER": "", "VLLM_X": "1"}
    unsupported.drop_empty(environment)
    assert environment == {"VLLM_PLUGINS": "", "OTHER": "", "VLLM_X": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "serve", str(tmp_path / "none")],
        env={**os.environ, "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "", "VLLM_PORT": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, "there is no model" in done.stderr) == (2, True)


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    """A key that only this user can read."""
    path = tmp_path / "node.key"
    path.write_text("k" * 32)
    path.chmod(0o600)
    return str(path)


def test_a_head_says_what_is_wrong_with_its_key(key_file: str) -> None:
    """A flag without effect is a warning."""
    flags = ("--demo", "--nnodes=2", "--port=0", "--master-port=29501")
    without_key = holdfast(
        "serve", *flags, "--master-addr=127.0.0.1", "--node-key-file", f"{key_file}.none"
    )
    assert without_key.returncode == 2
    assert "--master-port has no effect" in without_key.stderr
    assert "No such file" in without_key.stderr.splitlines()[-1]


def test_help_of_a_follower_needs_no_vllm() -> None:
    """It has every flag, and the exit codes."""
    ended = holdfast("follow", "--help")
    assert ended.returncode == 0
    for part in ("HOST[:PORT]", "--node-key-file", "--node-name", "--ssl-ca-certs", "6 address"):
        assert part in ended.stdout


def test_a_follower_imports_neither_vllm_nor_torch() -> None:
    """All that its process runs, the listener included, is loaded here."""
    command = "import holdfast.follow, sys; print(sorted({'vllm', 'torch'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"
