"""Restricts the formats of images, audio and clips that reach a decoder to those in use.

And how a decoder reads a clip.
"""

from __future__ import annotations

from io import BytesIO
from typing import Any

from vllm.entrypoints.speech_to_text.base import serving as speech_to_text
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import audio
from vllm.multimodal.video_decoders import opencv

from holdfast.patches.patch import original, replace

IMAGE_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
"""What clients send. vLLM accepts 36, with readers that hardly anybody reviews; in two of them, an
image may have another size than the header says."""

CALLS_OF_ANY_CLIP = 1 << 14
BYTES_OF_A_CALL = 1 << 8
"""FFmpeg reads 32 KiB at once, and rarely reads twice."""

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


def read_clips_safely() -> None:
    """Have OpenCV read clips so that a damaged one ends neither the process nor never.

    OpenCV 5.0 crashes if `seek` raises, as it does for the negative positions that a damaged index
    has FFmpeg seek to. Other damage has FFmpeg return to the same place forever. A second call
    changes nothing.
    """
    opencv.BytesIO = _Clip


class _Clip(BytesIO):
    """A file that does not raise, and ends for good after more calls than a valid one needs."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._calls_left = CALLS_OF_ANY_CLIP + len(data) // BYTES_OF_A_CALL

    def seek(self, offset: int, whence: int = 0) -> int:
        try:
            return super().seek(offset, whence) if self._is_readable() else -1
        except (OverflowError, ValueError):
            return -1

    def read(self, size: int | None = -1) -> bytes:
        return super().read(size) if self._is_readable() else b""

    def _is_readable(self) -> bool:
        self._calls_left -= 1
        return self._calls_left > 0
