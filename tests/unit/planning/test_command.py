"""`holdfast plan`: what it knows from a model's files and flags, and what it does not pretend."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from vllm.engine import arg_utils
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.transformers_utils import repo_utils
from vllm.usage.usage_lib import UsageContext

from holdfast import cli
from holdfast.errors import UsageError
from holdfast.planning import DEVICE_NAMES, PlanFlags, command, config, take_plan_flags
from holdfast.planning.report import FIRST_START, PlanReport, SlotPlan
from holdfast.workspace.plan import MIB
from model_configs import DEEPSEEK_V4, written

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "vocab_size": 1000,
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "dtype": "bfloat16",
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "max_position_embeddings": 4096,
}

LONGCAT_FLASH: dict[str, Any] = {
    **DEEPSEEK_V3,
    "architectures": ["LongcatFlashForCausalLM"],
    "model_type": "longcat_flash",
    "num_layers": 28,
    "num_hidden_layers": 56,
}
BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "dtype": "float32",
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 8194,
}
QWEN3_VL: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "text_config": {
        **{name: value for name, value in LLAMA.items() if name != "architectures"},
        "model_type": "qwen3_vl_text",
        "head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000000},
    },
    "vision_config": {"model_type": "qwen3_vl"},
}

MINIMAX_M3: dict[str, Any] = {
    "architectures": ["MiniMaxM3SparseForCausalLM"],
    "model_type": "minimax_m3_vl",
    "text_config": {"num_hidden_layers": 60},
}
INKLING: dict[str, Any] = {
    "architectures": ["InklingForCausalLM"],
    "model_type": "inkling_model",
}

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
"""That of FP8, in the words of compressed-tensors."""
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}


def planned(*arguments: str, device: str | None = "h100") -> PlanReport:
    return command.plan(cli.parse_serve(arguments, {}), device)


def only_slot(report: PlanReport) -> SlotPlan:
    ((slot,),) = (rank.slots for rank in report.ranks)
    return slot


def open_terms(report: PlanReport) -> list[str]:
    return [term.asked_by for term in report.measured_at_first_start]


def test_a_model_with_a_reserver(tmp_path: Path) -> None:
    """Each term names its caller, and the slot is the largest term plus headroom."""
    report = planned(
        written(tmp_path, DEEPSEEK_V4),
        *("--max-num-batched-tokens", "65536", "--workspace-reserve", "64MiB"),
    )
    slot = only_slot(report)
    assert [(term.source, term.asked_by) for term in slot.terms] == [
        ("floor", "--workspace-reserve"),
        ("declared", "DeepSeek-V4 prefill"),
    ]
    assert slot.terms[1].needed_bytes / MIB == pytest.approx(2368.75, abs=0.01)
    assert slot.size_bytes == 2606 * MIB
    assert report.device == "h100"


def test_kernels_follow_the_device(tmp_path: Path) -> None:
    """GB10 runs kernels with a buffer of their own, so nothing is reserved for them."""
    model = written(tmp_path, DEEPSEEK_V4)
    assert only_slot(planned(model, device="b200")).size_bytes > 0
    assert only_slot(planned(model, device="gb10")).size_bytes == 0


def test_a_device_without_such_kernels_is_not_guessed(tmp_path: Path) -> None:
    """What a CPU does not tell about DeepSeek-V4 is measured at first start."""
    report = planned(written(tmp_path, DEEPSEEK_V4), device="cpu")
    assert only_slot(report).terms == ()
    assert "DeepSeek-V4 prefill" in open_terms(report)


def test_experts_are_measured_at_first_start(tmp_path: Path) -> None:
    """Which kernel they use is only known in a worker."""
    report = planned(written(tmp_path, DEEPSEEK_V3))
    assert open_terms(report) == ["fused MoE"]
    assert any(FIRST_START in line and "fused MoE" in line for line in report.lines())


def test_an_unknown_device_leaves_all_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device vLLM's size of a step is unknown, and so is every need."""
    monkeypatch.setattr(command, "device_of_platform", lambda: None)
    model = written(tmp_path, LLAMA)
    report = planned(model, device=None)
    assert (report.device, report.max_num_batched_tokens) == (None, None)
    assert open_terms(report) == ["every reserver"]
    sizes = ("--max-num-batched-tokens", "512", "--max-num-seqs", "4")
    assert open_terms(planned(model, *sizes, device=None)) == []


def test_a_model_without_a_reserver_is_left_to_the_probe(tmp_path: Path) -> None:
    """The plan says that nothing is known, and that the probe will find out."""
    report = planned(written(tmp_path, LLAMA))
    assert "no reserver for LlamaForCausalLM: the probe" in report.notes[0]
    assert only_slot(report).size_bytes == 0


def test_a_model_with_only_open_terms_has_a_reserver(tmp_path: Path) -> None:
    """A plan that names what is measured does not point to the probe."""
    report = planned(written(tmp_path, DEEPSEEK_V3))
    assert not any("no reserver" in note for note in report.notes)


@pytest.mark.parametrize(
    ("flags", "token_bytes"),
    [
        ((), 30 * 2 * 8 * 128 * 2),
        (("--tensor-parallel-size", "4"), 30 * 2 * 2 * 128 * 2),
        (("--tensor-parallel-size", "16"), 30 * 2 * 1 * 128 * 2),
        (("--kv-cache-dtype", "fp8"), 30 * 2 * 8 * 128),
        (("--dtype", "float32"), 30 * 2 * 8 * 128 * 4),
    ],
)
def test_bytes_are_told_in_tokens(tmp_path: Path, flags: tuple[str, ...], token_bytes: int) -> None:
    """A reservation costs as many tokens of the KV cache as its bytes would hold."""
    report = planned(written(tmp_path, LLAMA), "--workspace-reserve", "100MiB", *flags)
    (slot,) = report.ranks[0].slots
    assert report.ranks[0].kv_bytes_per_token == token_bytes
    assert slot.kv_tokens == -(-slot.size_bytes // token_bytes)
    assert slot.terms[0].kv_tokens == -(-100 * MIB // token_bytes)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": SCHEME},
        {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME},
    ],
)
def test_a_checkpoint_may_say_how_its_cache_is_stored(
    tmp_path: Path, quantization: dict[str, Any]
) -> None:
    """With `auto` alone; what a flag says counts first."""
    model = written(tmp_path, {**LLAMA, "quantization_config": quantization})
    assert planned(model).ranks[0].kv_bytes_per_token == 30 * 2 * 8 * 128
    given = planned(model, "--kv-cache-dtype", "bfloat16")
    assert given.ranks[0].kv_bytes_per_token == 30 * 2 * 8 * 128 * 2


def test_a_checkpoint_may_say_so_in_a_file_of_its_own(tmp_path: Path) -> None:
    """So ModelOpt did before version 0.31."""
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    content = {"producer": {"name": "modelopt"}, "quantization": quantization}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    report = planned(written(tmp_path, LLAMA))
    assert report.ranks[0].kv_bytes_per_token == 30 * 2 * 8 * 128


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_without_layers_cost_nothing(tmp_path: Path, method: str) -> None:
    """They are found in the text, so the price is that of the model."""
    drafting = json.dumps({"method": method, "num_speculative_tokens": 4})
    report = planned(written(tmp_path, LLAMA), "--speculative-config", drafting)
    assert report.ranks[0].kv_bytes_per_token == 30 * 2 * 8 * 128 * 2


def test_a_latent_cache_is_named(tmp_path: Path) -> None:
    """MLA keeps one latent a token, the same on every tensor-parallel rank."""
    report = planned(written(tmp_path, DEEPSEEK_V3), "--tensor-parallel-size", "8")
    assert report.ranks[0].kv_bytes_per_token == 61 * (512 + 64) * 2
    assert report.kv_cache.startswith("MLA: one latent")


def test_without_a_latent_cache_every_head_has_keys_and_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM_MLA_DISABLE turns MLA off; values are padded to the size of the keys."""
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    report = planned(written(tmp_path, DEEPSEEK_V3), "--tensor-parallel-size", "8")
    assert report.ranks[0].kv_bytes_per_token == 61 * 2 * (128 // 8) * (128 + 64) * 2


@pytest.mark.parametrize(
    ("overrides", "length"),
    [
        ({"text_config": {"max_position_embeddings": 1010000}}, 1010000),
        (
            {
                "text_config": {
                    "rope_parameters": {"rope_type": "yarn", "factor": 4.0},
                    "max_position_embeddings": 1010000,
                }
            },
            1010000,
        ),
        ({"architectures": ["Other"]}, 131072),
    ],
)
def test_nested_overrides_change_what_they_name_alone(
    tmp_path: Path, overrides: dict[str, Any], length: int
) -> None:
    """As in vLLM, they are merged into the part that they name."""
    report = planned(written(tmp_path, QWEN3_VL), "--hf-overrides", json.dumps(overrides))
    assert report.max_model_len == length
    assert report.ranks[0].kv_bytes_per_token == 30 * 2 * 8 * 128 * 2


def test_an_override_may_be_a_dictionary(tmp_path: Path) -> None:
    """As that of RoPE, which is not a part with a configuration of its own."""
    overrides = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
    report = planned(written(tmp_path, LLAMA), "--hf-overrides", json.dumps(overrides))
    assert report.max_model_len == 2 * 131072


def test_the_configuration_may_be_elsewhere(tmp_path: Path) -> None:
    """In the directory of --hf-config-path."""
    for name in ("model", "other"):
        (tmp_path / name).mkdir()
    model = written(tmp_path / "model", LLAMA)
    other = written(tmp_path / "other", {**LLAMA, "max_position_embeddings": 4096})
    assert planned(model, "--hf-config-path", other).max_model_len == 4096


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("sentence_bert_config.json", {"max_seq_length": 512}),
        ("tokenizer_config.json", {"model_max_length": 512}),
    ],
)
def test_files_may_limit_the_context_of_an_encoder(
    tmp_path: Path, file: str, content: dict[str, Any]
) -> None:
    """That of sentence-transformers does, and that of the tokenizer if positions are absolute."""
    (tmp_path / file).write_text(json.dumps(content))
    model = written(tmp_path, {**BERT, "position_embedding_type": "absolute"})
    assert planned(model).max_model_len == 512


@pytest.mark.parametrize(
    ("content", "flags", "has_cache"),
    [
        (BERT, (), False),
        ({**LLAMA, "architectures": ["LlamaModel"], "is_causal": False}, (), False),
        ({**LLAMA, "architectures": ["LlamaModel"]}, (), True),
        (LLAMA, ("--runner", "pooling"), True),
    ],
)
def test_only_a_decoder_certainly_has_a_kv_cache(
    tmp_path: Path, content: dict[str, Any], flags: tuple[str, ...], *, has_cache: bool
) -> None:
    """A pooling model may be one, too."""
    (rank,) = planned(written(tmp_path, content), *flags).ranks
    assert (rank.kv_bytes_per_token is not None) == has_cache


def test_layers_with_several_attentions_have_no_price(tmp_path: Path) -> None:
    """LongCat-Flash has two in each layer."""
    report = planned(written(tmp_path, LONGCAT_FLASH))
    assert report.ranks[0].layers == 28
    assert "several attentions" in report.kv_cache


@pytest.mark.parametrize(
    ("changed", "flags"),
    [
        ({"sliding_window": 4096, "model_type": "mistral"}, ()),
        ({"layer_types": ["full_attention", "sliding_attention"] * 15}, ()),
        ({}, ("--kv-cache-dtype", "turboquant_k8v4")),
        ({}, ("-tp", "16", "-dcp", "2")),
        ({}, ("--speculative-config", '{"method": "eagle3", "model": "d"}')),
        ({}, ("--spec-model", "d")),
        ({}, ("--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "0", "1")),
        ({"architectures": ["BailingMoeV3ForCausalLM"], "layer_group_size": 8}, ()),
        ({"architectures": ["IQuestLoopCoderForCausalLM"], "loop_num": 2}, ()),
        (MINIMAX_M3, ()),
        (INKLING, ()),
        ({"block_configs": [{"attention": {"no_op": True}}] * 30}, ()),
        ({"quantization_config": NVFP4}, ()),
    ],
)
def test_an_uneven_cache_has_no_price(
    tmp_path: Path, changed: dict[str, Any], flags: tuple[str, ...]
) -> None:
    """Where a token has no single size the cost is unknown, with the reason."""
    report = planned(written(tmp_path, {**LLAMA, **changed}), *flags)
    assert report.ranks[0].kv_bytes_per_token is None
    assert only_slot_costs(report) == {None}
    assert report.kv_cache.startswith("unknown: ")


def only_slot_costs(report: PlanReport) -> set[int | None]:
    return {slot.kv_tokens for rank in report.ranks for slot in rank.slots}


def test_packed_caches_are_reserved_for(tmp_path: Path) -> None:
    """TurboQuant's two needs stand beside each other, for the heads of one rank."""
    report = planned(
        written(tmp_path, LLAMA),
        *("--kv-cache-dtype", "turboquant_k8v4", "--tensor-parallel-size", "4"),
        *("--max-model-len", "100001", "--block-size", "32"),
    )
    needs = {term.asked_by: term.needed_bytes for term in report.ranks[0].slots[0].terms}
    assert needs["TurboQuant continuation"] == 2 * 2 * 100_000 * 128 * 2
    assert needs["TurboQuant decode"] == (1024 * 8 * (32 * 129 * 4 + 128 * 2 + 4))


def test_stages_differ_and_ranks_do_not(tmp_path: Path) -> None:
    """Every rank reserves the same, and a stage with fewer layers pays more tokens for it."""
    model = written(tmp_path, {**LLAMA, "num_hidden_layers": 29})
    flags = ("--pipeline-parallel-size", "2", "--tensor-parallel-size", "2")
    report = planned(model, "--workspace-reserve", "64MiB", *flags)
    assert [(rank.rank, rank.layers) for rank in report.ranks] == [
        (0, 15),
        (1, 15),
        (2, 14),
        (3, 14),
    ]
    assert len({slot.size_bytes for rank in report.ranks for slot in rank.slots}) == 1
    assert {line.split()[0] for line in report.lines()} >= {"0-1", "2-3"}


def test_a_length_that_is_fitted_is_planned_for_the_longest(tmp_path: Path) -> None:
    """Without a device nobody knows what fits, and the plan says so."""
    model = written(tmp_path, DEEPSEEK_V4)
    fitted, given = planned(model, "--max-model-len", "auto"), planned(model)
    assert fitted.ranks == given.ranks
    assert [note for note in fitted.notes if note.startswith("--max-model-len auto")]
    assert not [note for note in given.notes if note.startswith("--max-model-len auto")]


def test_the_lane_of_drafts_is_not_planned_the_targets_prefill(tmp_path: Path) -> None:
    """DSpark's drafts ask in a lane of their own, for which no reserver of ours declares."""
    drafting = json.dumps({"method": "dspark", "num_speculative_tokens": 4})
    report = planned(written(tmp_path, DEEPSEEK_V4), "--speculative-config", drafting)
    ((target, draft),) = (rank.slots for rank in report.ranks)
    assert [(slot.ubatch, slot.lane) for slot in (target, draft)] == [(0, 0), (0, 1)]
    assert target.size_bytes > 0
    assert (draft.size_bytes, draft.terms) == (0, ())


@pytest.mark.parametrize(
    ("flags", "lanes"),
    [
        (("--spec-method", "dspark", "--spec-tokens", "4"), 2),
        (("--spec-model", "deepseek-ai/dspark_qwen3_8b_block7", "--spec-tokens", "4"), 2),
        (("--speculative-config", '{"model": "a/DSpark", "num_speculative_tokens": 4}'), 2),
        (("--spec-model", "a/dspark-eagle3", "--spec-tokens", "4"), 1),
        (("--spec-method", "eagle3", "--spec-model", "a/dspark", "--spec-tokens", "4"), 1),
        (("--spec-method", "ngram", "--spec-tokens", "4"), 1),
        (("--spec-model", "a/draft", "--spec-tokens", "4"), 1),
    ],
)
def test_drafts_have_a_lane_if_vllm_takes_them_for_those_of_dspark(
    tmp_path: Path, flags: tuple[str, ...], lanes: int
) -> None:
    """By the method, or by the name of the draft, where other names come first."""
    (rank,) = planned(written(tmp_path, LLAMA), *flags).ranks
    assert [slot.lane for slot in rank.slots] == [*range(lanes)]


def test_drafts_have_a_lane_if_their_files_say_dspark(tmp_path: Path) -> None:
    """A draft may have any name."""
    for name in ("model", "draft"):
        (tmp_path / name).mkdir()
    model = written(tmp_path / "model", LLAMA)
    draft = written(tmp_path / "draft", {**LLAMA, "architectures": ["Qwen3DSparkModel"]})
    (rank,) = planned(model, "--spec-model", draft, "--spec-tokens", "4").ranks
    assert [slot.lane for slot in rank.slots] == [0, 1]


def test_the_ranks_of_prefill_context_parallelism_are_planned(tmp_path: Path) -> None:
    """They multiply those of tensor parallelism, in each stage."""
    flags = ("--tensor-parallel-size", "2", "--prefill-context-parallel-size", "2")
    report = planned(written(tmp_path, LLAMA), "--pipeline-parallel-size", "2", *flags)
    assert [rank.rank for rank in report.ranks] == [*range(8)]
    assert [rank.layers for rank in report.ranks] == [15] * 8


@pytest.mark.parametrize(
    ("changed", "flags", "tokens"),
    [
        ({"architectures": ["LlamaModel"]}, (), None),
        ({}, ("--runner", "pooling"), None),
        ({}, ("--convert", "embed"), None),
        ({"architectures": ["LlamaModel"]}, ("--max-num-batched-tokens", "512"), 512),
        ({"architectures": ["LlamaModel"]}, ("--runner", "generate"), 8192),
        ({}, ("--runner", "pooling", "--max-model-len", "512"), 8192),
        ({}, ("--runner", "pooling", "--enable-chunked-prefill"), 8192),
        ({}, ("--runner", "pooling", "--no-enable-chunked-prefill"), 131072),
    ],
)
def test_a_pooling_model_may_need_a_step_for_its_longest_prompt(
    tmp_path: Path, changed: dict[str, Any], flags: tuple[str, ...], tokens: int | None
) -> None:
    """Its code says so, which a plan does not load; what flags or the length decide is planned."""
    report = planned(written(tmp_path, {**LLAMA, **changed}), *flags)
    assert report.max_num_batched_tokens == tokens
    assert open_terms(report) == ([] if tokens else ["every reserver"])


def test_a_model_with_modules_for_pooling_is_a_pooling_model(tmp_path: Path) -> None:
    """As sentence-transformers saves one."""
    module = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
    (tmp_path / "modules.json").write_text(json.dumps([module]))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    assert planned(written(tmp_path, LLAMA)).max_num_batched_tokens is None


def test_two_ubatches_are_two_slots(tmp_path: Path) -> None:
    """With dual-batch overlap every rank reserves twice."""
    report = planned(written(tmp_path, LLAMA), "--enable-dbo")
    ((first, second),) = (rank.slots for rank in report.ranks)
    assert [(slot.ubatch, slot.lane) for slot in (first, second)] == [(0, 0), (1, 0)]


@pytest.mark.parametrize(
    ("device", "name", "memory_gib"),
    [
        ("gb10", "NVIDIA GB10", None),
        ("rtxpro6000", "NVIDIA RTX PRO 6000", 95),
        ("h100", "NVIDIA H100", 79),
        ("h200", "NVIDIA H200", 139),
        ("b200", "NVIDIA B200", 178),
    ],
)
def test_defaults_of_a_device_are_those_of_vllm(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    name: str,
    memory_gib: float | None,
) -> None:
    """The size of a step that is not given is what vLLM takes on such a device."""
    report = planned(written(tmp_path, LLAMA), device=device)
    platform = _Platform(name, None if memory_gib is None else int(memory_gib * 1024**3))
    monkeypatch.setattr(arg_utils, "current_platform", platform)
    tokens, sequences = AsyncEngineArgs.get_batch_defaults(1)
    assert report.max_num_batched_tokens == tokens[UsageContext.OPENAI_API_SERVER]
    assert report.max_num_seqs == sequences[UsageContext.OPENAI_API_SERVER]


class _Platform:
    """What vLLM asks its platform about when it looks for defaults."""

    def __init__(self, name: str, memory_bytes: int | None) -> None:
        self._name = name
        self._memory_bytes = memory_bytes

    def get_device_total_memory(self) -> int:
        if self._memory_bytes is None:
            raise RuntimeError("NVML does not tell the memory of a unified device")
        return self._memory_bytes

    def get_device_name(self) -> str:
        return self._name

    def is_device_capability(self, capability: tuple[int, int]) -> bool:
        return capability == (12, 1) and self._memory_bytes is None

    def is_tpu(self) -> bool:
        return False

    def is_cpu(self) -> bool:
        return False


def test_the_cpu_has_the_defaults_of_vllm(tmp_path: Path) -> None:
    """Named or found, the CPU gives the same plan, which grows with the ranks of an engine."""
    model = written(tmp_path, LLAMA)
    flags = ("--tensor-parallel-size", "2")
    named, found = planned(model, *flags, device="cpu"), planned(model, *flags, device=None)
    assert named == found
    assert (named.max_num_batched_tokens, named.max_num_seqs) == (4096, 256)


def test_every_device_that_can_be_named_is_known() -> None:
    """The names in the help, which is printed without vLLM, are those of the plan."""
    assert tuple(config.DEVICES) == DEVICE_NAMES


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (None, "config.json"),
        ("{", "not a valid JSON"),
        ('{"model_type": "a_kind_that_nobody_knows"}', "a_kind_that_nobody_knows"),
        ("{}", "model_type"),
    ],
)
def test_a_model_that_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, cause: str
) -> None:
    """The reason is one line, and the exit code is that of bad usage."""
    # vLLM reads a file again after two seconds.
    monkeypatch.setattr(repo_utils, "time", SimpleNamespace(sleep=lambda _: None))
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=cause) as refused:
        planned(str(tmp_path))
    assert refused.value.exit_code == 2
    assert "\n" not in refused.value.line


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        (("-tp", "0"), "--tensor-parallel-size: 0 is not a number of ranks"),
        (("-tp", "-1"), "--tensor-parallel-size: -1 is not a number of ranks"),
        (("-pp", "0"), "--pipeline-parallel-size: 0 is not a number of ranks"),
        (("-dp", "0"), "--data-parallel-size: 0 is not a number of ranks"),
        (("-tp", "3"), "--tensor-parallel-size 3 does not divide the 32 attention heads"),
        (("-tp", "8", "-dcp", "2"), "--decode-context-parallel-size 2 does not fit"),
    ],
)
def test_a_layout_that_serve_refuses_is_refused(
    tmp_path: Path, flags: tuple[str, ...], cause: str
) -> None:
    """A plan for it would have no ranks, or parts of heads."""
    with pytest.raises(UsageError, match=cause):
        planned(written(tmp_path, LLAMA), *flags)


@pytest.mark.parametrize("is_latent", [True, False])
def test_ranks_share_out_heads_unless_the_cache_is_latent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_latent: bool
) -> None:
    """VLLM_MLA_DISABLE gives every rank heads, so context parallelism has nothing to split."""
    monkeypatch.setenv("VLLM_MLA_DISABLE", str(int(not is_latent)))
    with nullcontext() if is_latent else pytest.raises(UsageError, match="128 KV heads"):
        planned(written(tmp_path, DEEPSEEK_V3), "-tp", "8", "-dcp", "8")


def test_nothing_is_downloaded(tmp_path: Path) -> None:
    """A model or configuration that lies nowhere on this machine is refused, not fetched."""
    with pytest.raises(UsageError, match="nor in the Hugging Face cache"):
        planned("holdfast-nobody/nothing")
    with pytest.raises(UsageError, match="nor in the Hugging Face cache"):
        planned(written(tmp_path, LLAMA), "--hf-config-path", "holdfast-nobody/nothing")


def test_an_unknown_device_name_is_refused() -> None:
    """The devices that can be named are listed."""
    with pytest.raises(UsageError, match="rtxpro6000"):
        take_plan_flags(["model", "--device", "h800"])


def test_the_terminal_shows_the_same_rows(tmp_path: Path) -> None:
    """The table for people has what the text has."""
    report = planned(written(tmp_path, DEEPSEEK_V4))
    console = Console(width=200)
    with console.capture() as shown:
        report.print_table(console)
    for word in ("DeepSeek-V4 prefill", FIRST_START, "KV-cache tokens", "reserved"):
        assert word in shown.get()
        assert any(word in line for line in report.lines())


@pytest.mark.parametrize(("term", "is_drawn"), [("xterm", True), ("dumb", False)])
def test_a_terminal_that_can_only_print_lines_gets_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, term: str, *, is_drawn: bool
) -> None:
    """It gets the lines that a pipe gets."""
    drawn: list[Console] = []
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(PlanReport, "print_table", lambda _, console: drawn.append(console))
    settings = cli.parse_serve([written(tmp_path, LLAMA)], {})
    leader, follower = pty.openpty()
    with os.fdopen(leader, "rb"), os.fdopen(follower, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        command.print_plan(settings, PlanFlags("h100", is_json=False))
    assert bool(drawn) is is_drawn


def holdfast(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_prints_json_alone() -> None:
    """Standard output is one JSON object, whatever vLLM logs; the demo needs no model."""
    done = holdfast("plan", "--demo", "--json", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    (rank,) = report["ranks"]
    (term,) = rank["slots"][0]["terms"]
    assert term == {
        "source": "declared",
        "asked_by": "holdfast.demo: prefill scratch",
        "needed_bytes": 8 * MIB,
        "kv_tokens": 8 * MIB // rank["kv_bytes_per_token"],
    }


def test_the_command_ends_with_2_for_a_model_it_cannot_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The last line on standard error names the cause, and nothing is printed."""
    assert cli._run(["plan", str(tmp_path)]) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[-1].startswith("holdfast: error: ")


def test_a_machine_without_any_device_plans_too(tmp_path: Path) -> None:
    """vLLM's own command line fails where it finds no device; a plan for a named one does not."""
    script = (
        "import sys, vllm.platforms as platforms\n"
        "from vllm.platforms.interface import UnspecifiedPlatform\n"
        "platforms._current_platform = UnspecifiedPlatform()\n"
        "from holdfast.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    model = written(tmp_path, DEEPSEEK_V4)
    command = [sys.executable, "-c", script, "plan", model, "--device", "b200"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "DeepSeek-V4 prefill  1128.6 MiB" in done.stdout


def test_the_command_has_help() -> None:
    """Help needs neither a model nor vLLM."""
    done = holdfast("plan", "--help")
    assert done.returncode == 0
    assert "--device" in done.stdout
