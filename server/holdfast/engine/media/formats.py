"""Restricts the formats of images, audio and clips that reach a decoder to those in use."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from vllm.entrypoints.speech_to_text.base import serving as speech_to_text
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import audio

from holdfast.patches.patch import original, replace

IMAGE_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
"""What clients send. vLLM accepts 36, with readers that hardly anybody reviews; in two of them, an
image may have another size than the header says."""

_MARK_BYTES = 16
_CONTAINERS = (
    *((4, box) for box in (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide")),  # MP4, M4A
    (0, b"\x1a\x45\xdf\xa3"),  # Matroska, WebM
    (0, b"OggS"),
    (8, b"AVI "),
    (8, b"WAVE"),
    (8, b"AIFF"),
    (8, b"AIFC"),
    (0, b"fLaC"),
    (0, b"ID3"),
    *((0, bytes([0xFF, second])) for second in range(0xE0, 0x100)),  # MP3, AAC
    (0, b"#!AMR"),
    (0, b"caff"),
    (0, b"FLV\x01"),
    (0, b"\x30\x26\xb2\x75"),  # WMA, WMV
    (0, b"\x00\x00\x01\xba"),  # MPEG
    (0, b"\x00\x00\x01\xb3"),
    (0, b"\x47\x40"),  # transport stream
    (0, b"GIF8"),
)
"""The offset and the bytes that mark each format."""


def check_container(data: bytes) -> None:
    """Refuse what is not a container of audio or video: FFmpeg accepts much more than that.

    A session description makes it listen on the network, a list of files makes it open them.
    """
    if not any(data[start : start + len(mark)] == mark for start, mark in _CONTAINERS):
        raise VLLMValidationError("The container format of the media is not supported.")


def check_audio() -> None:
    """Check all audio in this way, also that of `/v1/audio`. A second call changes nothing."""
    as_vllm = original(audio, "load_audio")

    def load_audio(path: Any, **options: Any) -> Any:
        if isinstance(path, BytesIO):
            check_container(path.getvalue()[:_MARK_BYTES])
        return as_vllm(path, **options)

    replace(audio, "load_audio", load_audio)
    replace(speech_to_text, "load_audio", load_audio)
