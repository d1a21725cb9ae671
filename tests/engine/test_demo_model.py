"""The demo model in a real vLLM engine on the CPU, beside Hugging Face transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

import lock_shim
from holdfast.demo.files import ensure_demo_model
from holdfast.demo.reserver import declare

pytestmark = pytest.mark.engine

OUTPUT_TOKENS = 48
MAX_MODEL_LEN = 4096
MAX_NUM_BATCHED_TOKENS = 2048
DEADLINE_SECONDS = 240

GENERATE = f"""
import json, sys
from vllm import LLM, SamplingParams

def main():
    model, prompts = json.loads(sys.argv[1])
    engine = LLM(model=model, dtype="float32", enforce_eager=True, max_model_len={MAX_MODEL_LEN},
                 kv_cache_memory_bytes=64 * 1024**2,
                 max_num_batched_tokens={MAX_NUM_BATCHED_TOKENS})
    greedy = SamplingParams(temperature=0, max_tokens={OUTPUT_TOKENS}, ignore_eos=True)
    for prompt in prompts:
        (answer,) = engine.generate({{"prompt_token_ids": prompt}}, greedy, use_tqdm=False)
        print("TOKENS", json.dumps(list(answer.outputs[0].token_ids)), flush=True)

if __name__ == "__main__":
    main()
"""


def _generate(
    model: Path, prompts: Sequence[list[int]], environment: Mapping[str, str], tmp_path: Path
) -> tuple[list[list[int]], str]:
    """The tokens that an engine under vLLM's own locked manager answered, and its log."""
    script = tmp_path / "generate.py"
    script.write_text(GENERATE)
    finished = subprocess.run(
        [sys.executable, str(script), json.dumps([str(model), list(prompts)])],
        env={**os.environ, **environment},
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    lines = finished.stdout.splitlines()
    answers = [json.loads(line[6:]) for line in lines if line.startswith("TOKENS")]
    return answers, finished.stdout + finished.stderr


def _expected(model: Path, prompt: list[int], answer: list[int]) -> list[int]:
    """The greedy tokens of transformers after `prompt` and each start of `answer`."""
    import torch
    from transformers import AutoModelForCausalLM

    llama = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        logits = llama(torch.tensor([prompt + answer])).logits[0]
    greedy: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return greedy


def test_tokens_equal_transformers_in_a_scratch_of_the_declared_size(tmp_path: Path) -> None:
    """Greedy output is that of Llama on the same weights, and no prefill exceeds the declaration.

    The long prompts are chunked, and one continues the cached prefix of the other.
    """
    model = ensure_demo_model(tmp_path)
    config = json.loads((model / "config.json").read_text())
    context = SimpleNamespace(
        hf_config=SimpleNamespace(**config),
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
    )
    (declared,) = declare(context)
    environment = lock_shim.install(tmp_path / "shim", declared.needed_bytes)
    random = Random(1)
    prompt = [random.randrange(32, 127) for _ in range(3000)]
    prompts = [list(b"Hello"), prompt, (prompt + prompt)[: MAX_MODEL_LEN - OUTPUT_TOKENS]]
    answers, log = _generate(model, prompts, environment, tmp_path)
    assert len(answers) == len(prompts), log[-4000:]
    for asked, answer in zip(prompts, answers, strict=True):
        assert len(answer) == OUTPUT_TOKENS
        assert answer == _expected(model, asked, answer)


def test_long_prompt_kills_a_locked_engine(tmp_path: Path) -> None:
    """Under vLLM's own manager a short prompt is answered, and the first long one is not."""
    model = ensure_demo_model(tmp_path)
    environment = lock_shim.install(tmp_path / "shim")
    answers, log = _generate(model, [list(b"Hello"), [65] * 3000], environment, tmp_path)
    assert len(answers) == 1
    assert "Workspace is locked but allocation from 'model.py" in log
    assert "EngineDeadError" in log
