"""A tokenizer whose tokens are the 256 bytes and five special ones. Token id = byte."""

from __future__ import annotations

import json
from pathlib import Path

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
BOS_ID, EOS_ID, IM_START_ID, IM_END_ID, PAD_ID = range(256, 256 + len(SPECIAL_TOKENS))
VOCABULARY_SIZE = 256 + len(SPECIAL_TOKENS)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")

_TOOLS_TURN = (
    "{{ '<|im_start|>system\\n<tools>\\n' }}"
    "{% for tool in tools %}"
    "{{ tool.function.name }}("
    "{% set schema = tool.function.parameters or {} %}"
    "{% if schema.properties is mapping %}"
    "{% for name, kind in schema.properties.items() %}"
    "{{ name }}{{ '' if name in (schema.required or []) else '?' }}: "
    "{{ kind.type if kind is mapping and kind.type is string else 'any' }}"
    "{{ '' if loop.last else ', ' }}"
    "{% endfor %}"
    "{% endif %}"
    "{{ ')\\n' }}"
    "{% endfor %}"
    "{{ '</tools><|im_end|>\\n' }}"
)
_CALLS = (
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '\\n' if message['content'] or not loop.first else '' }}"
    "{{ '<tool_call>\\n{\"name\": ' + call.function.name | tojson }}"
    "{{ ', \"arguments\": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}"
    "{% endfor %}"
)
CHAT_TEMPLATE = (
    "{% if tools %}" + _TOOLS_TURN + "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    + _CALLS
    + "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML, with a line for each function, and calls of functions as Hermes models write them."""


def write_tokenizer(directory: Path, max_model_tokens: int) -> None:
    """Write `TOKENIZER_FILES`, which `transformers` and vLLM load as a fast tokenizer."""
    from tokenizers import (  # noqa: PLC0415 - only the first use needs it
        AddedToken,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
    )

    bytes_as_characters = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=bytes_as_characters, merges=[]))
    # Each byte is a token, however a text is split. The library keeps 10,000 pieces for each of its
    # threads: unsplit texts took 3.4 kB each, and the server grew by 240 MiB an hour meanwhile.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    bos, eos, _, _, pad = SPECIAL_TOKENS
    configuration = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "model_max_length": max_model_tokens,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(configuration, indent=2))


def _byte_characters() -> list[str]:
    """Return byte-level BPE's character for each byte: the byte's own if it is printable."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (byte for byte in range(256) if byte not in visible)
    stand_ins = {byte: chr(256 + index) for index, byte in enumerate(hidden)}
    return [stand_ins.get(byte, chr(byte)) for byte in range(256)]
