"""Tiny models made with `transformers`, of architectures that Holdfast's code does not know.

Random weights from a fixed seed and the byte-level tokenizer. vLLM serves each on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from holdfast.demo.tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCABULARY_SIZE, write_tokenizer

MAX_MODEL_TOKENS = 2048
BYTE_TOKENS = 256
IMAGE_PIXELS = 56
PATCH_PIXELS = 14
QUERY_TOKENS = 4
_SEED = 7
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_MODEL_TOKENS,
    "initializer_range": 0.2,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "dtype": "float32",
}
_TEKKEN_WORDS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
"""The words that steer a model of Mistral, by their number."""


def make_qwen(directory: Path) -> Path:
    """A Qwen3 with two layers, in `directory`; the same files if they are there already."""

    def make() -> Any:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        configuration = Qwen3Config(**_SHAPE, num_key_value_heads=2, head_dim=32)
        return Qwen3ForCausalLM(configuration)

    return _make_once(directory, make)


def make_mixtral(directory: Path) -> Path:
    """A Mixtral with two layers of four experts, two of them active, and Mistral's own tokenizer.

    vLLM takes that from the package `mistral-common`, and none of Hugging Face's.
    """

    def make() -> Any:
        from transformers import MixtralConfig, MixtralForCausalLM

        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
        ids = {
            "vocab_size": len(_TEKKEN_WORDS) + BYTE_TOKENS,
            "bos_token_id": _TEKKEN_WORDS.index("<s>"),
            "eos_token_id": _TEKKEN_WORDS.index("</s>"),
            "pad_token_id": _TEKKEN_WORDS.index("<pad>"),
        }
        configuration = MixtralConfig(**_SHAPE | ids, num_key_value_heads=2, **experts)
        return MixtralForCausalLM(configuration)

    return _make_once(directory, make, _write_tekken)


def make_embedding(directory: Path) -> Path:
    """A BERT with two layers, which vLLM serves as a pooling model."""

    def make() -> Any:
        from transformers import BertConfig, BertModel

        return BertModel(BertConfig(**_SHAPE))

    return _make_once(directory, make)


def make_whisper(directory: Path) -> Path:
    """A Whisper with two layers each way, which answers a chat with no prompt of bare tokens."""

    def make() -> Any:
        from transformers import WhisperConfig, WhisperForConditionalGeneration

        first, last = BYTE_TOKENS, BYTE_TOKENS + 1
        configuration = WhisperConfig(
            vocab_size=VOCABULARY_SIZE + 200,
            d_model=128,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=128,
            decoder_ffn_dim=128,
            bos_token_id=last,
            eos_token_id=last,
            pad_token_id=last,
            decoder_start_token_id=first,
            suppress_tokens=None,
            begin_suppress_tokens=None,
            dtype="float32",
        )
        return WhisperForConditionalGeneration(configuration)

    return _make_once(directory, make, _write_whisper_processor)


def make_blip(directory: Path) -> Path:
    """A BLIP-2 over an OPT with two layers each way, which takes images of 56 x 56."""

    def make() -> Any:
        from transformers import (
            Blip2Config,
            Blip2ForConditionalGeneration,
            Blip2QFormerConfig,
            Blip2VisionConfig,
            OPTConfig,
        )

        small = {"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        vision = Blip2VisionConfig(
            **small, hidden_size=64, image_size=IMAGE_PIXELS, patch_size=PATCH_PIXELS
        )
        former = Blip2QFormerConfig(**small, hidden_size=64, encoder_hidden_size=64)
        text = OPTConfig(
            **_SHAPE | {"vocab_size": VOCABULARY_SIZE + 1},
            ffn_dim=256,
            word_embed_proj_dim=128,
        )
        configuration = Blip2Config(
            vision_config=vision,
            qformer_config=former,
            text_config=text,
            num_query_tokens=QUERY_TOKENS,
            image_token_index=VOCABULARY_SIZE,
            dtype="float32",
        )
        return Blip2ForConditionalGeneration(configuration)

    return _make_once(directory, make, _write_blip_processor)


def _write_tekken(directory: Path, _max_model_tokens: int) -> None:
    """A tokenizer of bytes in Mistral's format, Tekken."""
    import base64
    import json

    content = {
        "config": {
            "pattern": ".",
            "num_vocab_tokens": BYTE_TOKENS,
            "default_vocab_size": BYTE_TOKENS + len(_TEKKEN_WORDS),
            "default_num_special_tokens": len(_TEKKEN_WORDS),
            "version": "v7",
        },
        "vocab": [
            {"rank": n, "token_bytes": base64.b64encode(bytes([n])).decode(), "token_str": None}
            for n in range(BYTE_TOKENS)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": word, "is_control": True}
            for rank, word in enumerate(_TEKKEN_WORDS)
        ],
    }
    (directory / "tekken.json").write_text(json.dumps(content))


def _write_blip_processor(directory: Path, max_model_tokens: int) -> None:
    """What turns an image into pixels, and the token that stands for one."""
    import json

    from tokenizers import AddedToken, Tokenizer

    write_tokenizer(directory, max_model_tokens)
    path = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_special_tokens([AddedToken("<image>", special=True)])
    tokenizer.save(path)
    pixels = {
        "image_processor_type": "BlipImageProcessor",
        "size": {"height": IMAGE_PIXELS, "width": IMAGE_PIXELS},
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "rescale_factor": 1 / 255,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": 3,
    }
    processor = {"processor_class": "Blip2Processor", "num_query_tokens": QUERY_TOKENS}
    (directory / "preprocessor_config.json").write_text(json.dumps(pixels))
    (directory / "processor_config.json").write_text(json.dumps(processor))


def _write_whisper_processor(directory: Path, max_model_tokens: int) -> None:
    """What turns audio and text into numbers, with the words that steer a Whisper."""
    import json

    from tokenizers import Tokenizer
    from transformers import WhisperFeatureExtractor
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    write_tokenizer(directory, max_model_tokens)
    words = ["startoftranscript", "endoftext", *LANGUAGES, "translate", "transcribe"]
    words += ["startoflm", "startofprev", "nospeech", "notimestamps"]
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"] = []
    path.write_text(json.dumps(content))
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([f"<|{word}|>" for word in words])
    tokenizer.save(str(path))
    end = "<|endoftext|>"
    names = {"tokenizer_class": "WhisperTokenizer", "bos_token": end, "eos_token": end}
    text = json.dumps({**names, "unk_token": end, "pad_token": end})
    (directory / "tokenizer_config.json").write_text(text)
    WhisperFeatureExtractor().save_pretrained(directory)


def _make_once(
    directory: Path,
    make: Callable[[], Any],
    write_processor: Callable[[Path, int], None] = write_tokenizer,
) -> Path:
    import torch

    if directory.exists():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=directory.parent) as staging, torch.random.fork_rng():
        torch.manual_seed(_SEED)
        made = Path(staging) / "model"
        make().save_pretrained(made)
        write_processor(made, MAX_MODEL_TOKENS)
        made.rename(directory)
    return directory
