"""An image of one colour, as large as the model takes it: what its encoder is asked."""

from __future__ import annotations

import base64
import struct
import zlib
from random import Random

from holdfast.lifecycle.probe.wire import Body
from holdfast.records import EngineFacts

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_BITS_OF_A_SAMPLE, _RED_GREEN_BLUE = 8, 2


def image_chat(facts: EngineFacts, width: int, height: int, random: Random, tokens: int) -> Body:
    """A chat about an image unlike every other, so that no cache of encoded ones shortcuts it."""
    encoded = base64.b64encode(png(width, height, random.randbytes(3))).decode()
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}},
        {"type": "text", "text": "Say one word."},
    ]
    return {
        "model": facts.model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "temperature": 0.0,
    }


def png(width: int, height: int, colour: bytes) -> bytes:
    """A PNG file of one colour (https://www.w3.org/TR/png-3/)."""
    header = struct.pack(">IIBBBBB", width, height, _BITS_OF_A_SAMPLE, _RED_GREEN_BLUE, 0, 0, 0)
    packer = zlib.compressobj(1)
    row = b"\0" + colour * width
    rows = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    return _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", rows) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)
