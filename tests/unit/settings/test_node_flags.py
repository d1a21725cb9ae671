"""vLLM's flags of several nodes: read early, and each wrong combination is one line."""

from __future__ import annotations

import pytest

from holdfast.cli import parse_serve
from holdfast.errors import UsageError
from holdfast.settings import Settings
from holdfast.settings.node_flags import is_host

HEAD = ("--nnodes", "2", "--master-addr", "10.0.0.1", "--node-key-file", "/key")
FOLLOWER = (*HEAD, "--node-rank", "1", "--headless")


def read(*arguments: str) -> Settings:
    return parse_serve(["model", *arguments], {})


def refused(*arguments: str) -> str:
    """The one line that a wrong command line gets."""
    with pytest.raises(UsageError) as caught:
        read(*arguments)
    assert caught.value.remedy
    return caught.value.line


def test_a_head_is_read() -> None:
    """Also in vLLM's short form; vLLM's own parser gets everything as it was given."""
    understood = read(*HEAD, "--node-port=30000")
    assert (understood.node_count, understood.node_rank) == (2, 0)
    assert understood.master_address == "10.0.0.1"
    assert (understood.nodes.port, str(understood.nodes.key_file)) == (30000, "/key")
    assert understood.vllm_arguments == ("model", *HEAD, "--node-port=30000")
    assert read("-n", "3", *HEAD[2:]).node_count == 3


@pytest.mark.parametrize(
    ("text", "is_possible"),
    [
        ("spark-1", True),
        ("spark_1.local.", True),
        ("10.0.0.1", True),
        ("fe80::1%eth0", True),
        ("a" * 63 + ".b", True),
        ("", False),
        (".", False),
        ("10.0.0..1", False),
        ("a" * 64, False),
        (".".join(["a"] * 128), False),
        ("spark 1", False),
        ("fe80::1%eth0:29600", False),
        ("fe80::1%a b", False),
    ],
)
def test_a_host_name_is_one_that_can_be_asked_for(text: str, is_possible: bool) -> None:
    """Python's own encoder refuses another one much later, and again with each attempt."""
    assert is_host(text) is is_possible


def test_one_node_is_the_default() -> None:
    """Nothing of several nodes is needed then."""
    understood = read()
    assert (understood.node_count, understood.node_rank) == (1, 0)
    assert (understood.master_address, understood.nodes.key_file) == ("", None)


def test_a_follower_is_read() -> None:
    """Its port for health is another one than that of a server, unless it is given."""
    assert read(*FOLLOWER).node_rank == 1
    assert read(*FOLLOWER).listen.port == 8001
    assert read(*FOLLOWER, "--port=8000").listen.port == 8000
    assert read("-n2", "-r1", *FOLLOWER[2:6], "--headless").node_rank == 1


@pytest.mark.parametrize("model", [(), ("/no/such/model",)])
def test_a_follower_needs_no_model(model: tuple[str, ...]) -> None:
    """The head hands it out."""
    assert parse_serve([*model, *FOLLOWER], {}).node_rank == 1


def test_a_master_port_is_accepted() -> None:
    """Command lines of vLLM have one; who gives it is told that it has no effect."""
    assert read(*HEAD, "--master-port", "29501").has_master_port
    assert not read(*HEAD).has_master_port


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--nnodes=0",), "--nnodes: 0 is not a number of nodes"),
        (("--nnodes=two",), "--nnodes/-n: invalid int value"),
        (("--nnodes=2", "--master-addr=h"), "--nnodes 2 needs --node-key-file"),
        (("--nnodes=2", "--node-key-file=/k"), "--nnodes 2 needs --master-addr"),
        (("--node-key-file=/k",), "--node-key-file was given, but"),
        (("--node-ssl-certfile=/c",), "--node-ssl-certfile was given, but"),
        (("--nnodes=1", "--node-ssl-keyfile=/c"), "--node-ssl-keyfile was given, but"),
        ((*HEAD, "--node-ssl-keyfile=/c"), "--node-ssl-keyfile was given without a certificate"),
        ((*HEAD, "--node-port=0"), "--node-port: expected a port from 1 to 65535, not '0'"),
        ((*HEAD, "--node-port=65536"), "--node-port: expected a port from 1 to 65535"),
        ((*HEAD, "--master-addr=10.0.0.1:29500"), "expected a host name or an address"),
        ((*HEAD, "--master-addr="), "expected a host name or an address"),
        ((*HEAD, "--master-addr=fe80::1%eth0"), "expected an address that all nodes can use, not"),
        ((*HEAD, "--headless"), "--headless is not supported without --node-rank"),
        (("--headless",), "--headless is not supported without --node-rank"),
        ((*HEAD, "--node-rank=1"), "--node-rank 1 is not supported without --headless"),
        ((*HEAD, "--node-rank=2", "--headless"), "--node-rank 2 does not exist with --nnodes 2"),
        (("--node-rank=1", "--headless"), "--node-rank 1 does not exist with --nnodes 1"),
        ((*HEAD, "--node-rank=-1", "--headless"), "--node-rank -1 does not exist"),
        ((*HEAD, "--data-parallel-size=2"), "--nnodes 2 is not supported with --data-parallel"),
        ((*HEAD, "--distributed-executor-backend=ray"), "--nnodes 2 is not supported with Ray"),
    ],
)
def test_a_wrong_combination_is_one_line(arguments: tuple[str, ...], named: str) -> None:
    """It names the flag, and what to change."""
    assert named in refused(*arguments)


@pytest.mark.parametrize("address", ["node-1", "10.0.0.1", "a_b.example", "fd00::1"])
def test_any_address_of_a_head_is_accepted(address: str) -> None:
    """A name or an address, as vLLM takes it."""
    assert read(*HEAD, f"--master-addr={address}").master_address == address


def test_the_key_may_be_named_by_a_variable() -> None:
    """As any flag of ours."""
    understood = parse_serve(["model", *HEAD[:4]], {"HOLDFAST_NODE_KEY_FILE": "/key"})
    assert str(understood.nodes.key_file) == "/key"
