"""Which flags of the head the ranks on other nodes get."""

from __future__ import annotations

import pytest

from holdfast.nodes.handed_flags import handed_out
from holdfast.settings import flags


@pytest.mark.parametrize(
    ("given", "handed"),
    [
        ("model --tensor-parallel-size 2 --enforce-eager", None),
        ("--demo --max-model-len=512", None),
        ("model --seed -1 --gpu-memory-utilization .8", None),
        ("model -tp 2 --rope-scaling {}", None),
        ("model --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 1", "model"),
        ("model -n 2 -r 0", "model"),
        ("--host 10.0.0.1 --port=80 model --uds /a", "model"),
        ("model --api-key one two --tensor-parallel-size 2", "model --tensor-parallel-size 2"),
        ("model --api-key=one --seed 1", "model --seed 1"),
        ("model --hf-token hf_secret --hf-overrides {}", "model --hf-overrides {}"),
        ("model --hf-tok hf_secret --hf-overrides {}", "model --hf-overrides {}"),
        ("model --hf-t=hf_secret --hf-config-path a", "model --hf-config-path a"),
        ("model --config a.yaml --seed 1", "model --seed 1"),
        ("model --workspace-reserve 1GiB --probe=off --seed 1", "model --seed 1"),
        ("model --node-key-file k --node-port 1", "model"),
        ("model --ssl-keyfile k --ssl-certfile=c --ssl-cert-reqs 2", "model"),
        ("model --api-key", "model"),
    ],
)
def test_what_differs_between_nodes_or_is_secret_stays_here(given: str, handed: str | None) -> None:
    """Everything of vLLM's that a rank may depend on is handed out, in its order."""
    wanted = given if handed is None else handed
    assert " ".join(handed_out(given.split())) == wanted


def test_no_flag_of_ours_is_handed_out_but_the_demo() -> None:
    """The ranks get the reservation and the policy with the spec."""
    ours = [word for flag in flags() for word in ([flag.name] + ["1"] * (not flag.is_switch))]
    assert handed_out(["--demo", *ours, "--seed", "1"]) == ("--demo", "--seed", "1")


def test_a_model_of_the_hub_is_pinned_to_the_commit_of_the_head() -> None:
    """Otherwise a node would take the newest commit that it finds."""
    assert handed_out(["owner/name"], revision="c0ffee") == ("owner/name", "--revision", "c0ffee")


@pytest.mark.parametrize("given", [["m", "--revision", "v1"], ["m", "--revision=v1"]])
def test_a_branch_becomes_the_commit_that_the_head_has(given: list[str]) -> None:
    """It may have moved since the head downloaded it."""
    assert handed_out(given, revision="c0ffee") == ("m", "--revision", "c0ffee")
    assert handed_out(given) == tuple(given)


@pytest.mark.parametrize(
    "given", [["m"], ["m", "--tokenizer-revision", "v1"], ["m", "--tokenizer-revision=v1"]]
)
def test_a_tokenizer_of_another_repository_gets_its_own_commit(given: list[str]) -> None:
    """vLLM would look there for the commit of the model."""
    flags = ("--revision", "c0ffee", "--tokenizer-revision", "decaf")
    assert handed_out(given, revision="c0ffee", tokenizer_revision="decaf") == ("m", *flags)


def test_a_tokenizer_revision_stays_without_another_one() -> None:
    """It may be that of the model's own repository."""
    given = ("m", "--tokenizer-revision", "v1")
    assert handed_out(given, revision="c0ffee") == (*given, "--revision", "c0ffee")
