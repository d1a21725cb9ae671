"""What `VllmOutputs` takes for granted of vLLM's requests, outputs and errors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.exceptions import GenerationError, GracefulHTTPError
from vllm.inputs.engine import embeds_input, tokens_input
from vllm.outputs import (
    CompletionOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestError,
    RequestOutput,
)
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import (
    EMPTY_CPU_TENSOR,
    OutputProcessor,
    RequestOutputCollector,
)
from vllm.v1.engine.parallel_sampling import ParentRequest

from holdfast.engine.outputs import VllmOutputs
from holdfast.engine.proxy import EngineProxy
from holdfast.errors import NotReadyError, RequestLostError

OUTPUTS = VllmOutputs()
LIVING, DEAD = SimpleNamespace(errored=False), SimpleNamespace(errored=True)


def _output(finish_reason: str | None, tokens: int = 2) -> RequestOutput:
    completion = CompletionOutput(
        0, "", list(range(tokens)), None, None, finish_reason=finish_reason
    )
    return RequestOutput("cmpl-1", None, [1, 2, 3], None, [completion], bool(finish_reason))


def _request(request_id: str) -> EngineCoreRequest:
    nothing: Any = dict.fromkeys(
        ("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank")
    )
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[1],
        sampling_params=SamplingParams(n=2),
        arrival_time=0.0,
        **nothing,
    )


def _pooling_request(request_id: str) -> EngineCoreRequest:
    nothing: Any = dict.fromkeys(
        ("mm_features", "sampling_params", "lora_request", "cache_salt", "data_parallel_rank")
    )
    request = EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[1],
        pooling_params=PoolingParams(task="embed"),
        arrival_time=0.0,
        **nothing,
    )
    request.external_req_id = request_id
    return request


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        (tokens_input([1, 2, 3]), 3),
        (embeds_input(torch.zeros(5, 2)), 5),
        (embeds_input(torch.zeros(5, 2), prompt_token_ids=[1, 2, 3, 4, 5]), 5),
        (_request("a"), 1),
        (None, 0),
    ],
)
def test_a_prompt_is_as_long_as_vllm_will_find_it(prompt: Any, tokens: int) -> None:
    """Whatever its form; the length of a stream is not known."""
    assert OUTPUTS.given_tokens({"prompt": prompt}) == tokens


@pytest.mark.parametrize(
    ("error", "llm", "is_death"),
    [
        (EngineDeadError(), LIVING, True),
        (EngineGenerateError(), DEAD, True),
        (EngineGenerateError(), LIVING, False),
        (ValueError("the prompt is too long"), DEAD, False),
    ],
)
def test_what_says_that_the_engine_is_dead(error: Exception, llm: Any, is_death: bool) -> None:
    """Its own error, or any failure to reach an engine that is known to be dead."""
    assert OUTPUTS.is_death(error, llm) is is_death


def test_tokens_are_counted_as_they_come() -> None:
    """The prompt stands in each output, of the answer only what is new; vectors have none."""
    pooled = PoolingRequestOutput("embd-1", PoolingOutput(None), [1, 2, 3], 0, finished=True)
    assert (OUTPUTS.prompt_tokens(_output(None)), OUTPUTS.new_tokens(_output(None))) == (3, 2)
    assert (OUTPUTS.prompt_tokens(pooled), OUTPUTS.new_tokens(pooled)) == (3, 0)


@pytest.mark.parametrize(("reason", "is_abort"), [("abort", True), ("stop", False), (None, False)])
def test_what_gives_a_request_up(reason: str | None, is_abort: bool) -> None:
    """The finish reason `abort`."""
    assert OUTPUTS.is_abort(_output(reason)) is is_abort


@pytest.mark.parametrize(
    ("data", "error", "is_abort"),
    [
        (EMPTY_CPU_TENSOR, None, True),
        (EMPTY_CPU_TENSOR, RequestError("multimodal_cache_miss", "It is gone.", True), False),
        (torch.ones(2, 1)[1:][:-1].squeeze(-1), None, False),
        (torch.ones(4), None, False),
        (torch.empty(0, 4), None, False),
        (torch.zeros(()), None, False),
    ],
)
def test_an_aborted_pooling_request_has_an_empty_vector(
    data: torch.Tensor, error: RequestError | None, *, is_abort: bool
) -> None:
    """No finish reason tells it. BGE-M3 answers an empty text with an empty vector as well."""
    output: Any = PoolingRequestOutput("embd-1", PoolingOutput(data), [1, 2], 0, True, error=error)
    assert OUTPUTS.is_abort(output) is is_abort
    assert OUTPUTS.is_answer(output) is not is_abort
    assert OUTPUTS.context_tokens(output) == 2


def test_vllm_ends_an_aborted_pooling_request_with_an_empty_vector() -> None:
    """That is all that its caller gets."""
    processor = OutputProcessor(None, log_stats=False)
    queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, "embd-1")
    processor.add_request(_pooling_request("embd-1"), None, queue=queue)
    processor.abort_requests(["embd-1"], internal=False)
    assert OUTPUTS.is_abort(queue.get_nowait())


def test_the_context_is_prompt_and_answer() -> None:
    """Of the longest answer."""
    assert OUTPUTS.context_tokens(_output(None, tokens=4)) == 7


def test_vllm_answers_with_our_words() -> None:
    """Without a traceback for each request: 500 in and before a stream, a plain 503."""
    lost = OUTPUTS.as_vllm_error(RequestLostError("the engine died"))
    gone = OUTPUTS.as_vllm_error(NotReadyError("ended", retry_after_seconds=5))
    assert isinstance(lost, GenerationError)
    assert isinstance(gone, GracefulHTTPError)
    assert (lost.status_code, gone.http_status) == (500, 503)


@pytest.mark.parametrize("is_kept", ["0", "1"])
@pytest.mark.parametrize("request_id", ["cmpl-a1-0", "chatcmpl-0_b", "7_x"])
def test_a_request_is_known_by_the_name_the_engine_gives_it(
    request_id: str, is_kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM numbers the answers of `n > 1`, and appends random characters unless told not to."""
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", is_kept)
    request = _request(request_id)
    InputProcessor.assign_request_id(request)
    child_id, _ = ParentRequest(request).get_child_info(1)
    assert request_id in OUTPUTS.request_ids(request.request_id)
    assert request_id in OUTPUTS.request_ids(child_id)
    assert request_id + "0" not in OUTPUTS.request_ids(request.request_id)
    assert request_id.rpartition("-")[0] not in OUTPUTS.request_ids(request.request_id)


def digest_of(prompt: Mapping[str, Any], **parameters: Any) -> str:
    """The digest of a request."""
    return OUTPUTS.digest_of({"prompt": prompt, "sampling_params": SamplingParams(**parameters)})


def test_the_same_request_is_known_again() -> None:
    """Whenever it comes, and whatever a client varies that changes nothing of its danger."""
    first = digest_of({"prompt_token_ids": [1, 2], "arrival_time": 1.0}, temperature=0.0)
    alike = digest_of(
        {"prompt_token_ids": [1, 2], "arrival_time": 2.0, "cache_salt": "salt"},
        temperature=0.0,
        seed=7,
        max_tokens=9,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    assert first == alike
    assert len(first) == 64


@pytest.mark.parametrize(
    "other",
    [
        digest_of({"prompt_token_ids": [1, 3]}),
        digest_of({"prompt_token_ids": [1]}),
        digest_of({"prompt_token_ids": [1, 2]}, temperature=0.5),
        digest_of({"prompt_token_ids": [1, 2]}, logit_bias={1: 2.0}),
        digest_of(
            {"prompt_token_ids": [1, 2]}, structured_outputs=StructuredOutputsParams(regex="a")
        ),
        digest_of({"prompt_token_ids": [1, 2]}, extra_args={"x": "y"}),
        digest_of({"prompt": "12"}),
    ],
)
def test_another_request_is_another(other: str) -> None:
    """A token, or a parameter that the engine computes with."""
    assert other != digest_of({"prompt_token_ids": [1, 2]})


def nested(depth: int, *, is_mapping: bool) -> Any:
    """A parameter that a client has nested."""
    value: Any = depth
    for _ in range(depth):
        value = {"a": value} if is_mapping else [value]
    return value


@pytest.mark.parametrize("is_mapping", [False, True])
def test_a_parameter_has_a_digest_however_deep_it_is(*, is_mapping: bool) -> None:
    """The digest is made when an engine has died: what fails then ends the server."""
    digests = {
        digest_of({"prompt_token_ids": [1]}, extra_args={"x": nested(depth, is_mapping=is_mapping)})
        for depth in (10_000, 10_001, 10_000)
    }
    assert len(digests) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_all_of_a_tensor_counts(dtype: torch.dtype) -> None:
    """Its text leaves most elements out, so that two prompts would look alike."""
    zeros = torch.zeros(4096).to(dtype)
    other = zeros.clone()
    other[2000] = 1.0
    assert digest_of({"prompt_embeds": zeros}) == digest_of({"prompt_embeds": zeros.clone()})
    assert digest_of({"prompt_embeds": zeros}) != digest_of({"prompt_embeds": other})
    assert digest_of({"prompt_embeds": zeros}) != digest_of({"prompt_embeds": zeros.view(64, 64)})


def test_a_pooling_request_has_an_identity_too() -> None:
    """Its task counts."""
    digests = {
        OUTPUTS.digest_of({"prompt": {"prompt_token_ids": [1]}, "pooling_params": parameters})
        for parameters in (PoolingParams(task="embed"), PoolingParams(task="classify"))
    }
    assert len(digests) == 2


async def _stream() -> AsyncGenerator[int, None]:
    yield 1


@pytest.mark.parametrize(
    ("arguments", "is_replayable"),
    [
        ({"prompt": {"prompt_token_ids": [1]}, "sampling_params": SamplingParams()}, True),
        ({"prompt": _stream(), "sampling_params": SamplingParams()}, False),
        ({"sampling_params": SamplingParams(extra_args={"kv_transfer_params": {}})}, False),
    ],
)
def test_what_cannot_be_sent_again(arguments: Any, is_replayable: bool) -> None:
    """A prompt that is read as it comes, and one whose KV cache lies elsewhere."""
    assert OUTPUTS.is_replayable(arguments) is is_replayable


@pytest.mark.parametrize("transfers_kv", [True, False])
def test_a_client_cannot_make_up_a_transfer(transfers_kv: bool) -> None:
    """Else no request that speaks of one could be tried, and none of them be found guilty."""
    arguments = {"sampling_params": SamplingParams(extra_args={"kv_transfer_params": {"a": 1}})}
    proxy = EngineProxy()
    transfer = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    config = VllmConfig(kv_transfer_config=transfer if transfers_kv else None)
    kept = dict.fromkeys(("model_config", "renderer", "input_processor"))
    proxy.use(SimpleNamespace(vllm_config=config, **kept))
    outputs = VllmOutputs(proxy.transfers_kv)
    assert outputs.is_replayable(arguments) is not transfers_kv


def test_a_trial_yields_after_each_token() -> None:
    """Whatever a client asks for; the caller's own parameters stay as they are."""
    parameters = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, stream_interval=1000)
    tried = OUTPUTS.trial_arguments("generate", {"sampling_params": parameters})
    assert tried["sampling_params"].output_kind is RequestOutputKind.CUMULATIVE
    assert tried["sampling_params"].stream_interval is None
    assert parameters.output_kind is RequestOutputKind.FINAL_ONLY
