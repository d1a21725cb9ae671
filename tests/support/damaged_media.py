"""Decodes media as the front end does, in processes that may die of it.

    python -m damaged_media CASE...

A case is one argument, and has a forked process of its own:

    KIND FILE                 decodes a file
    KIND SEED COUNT SECONDS   decodes files that are damaged

The second makes a small valid file of each allowed format of the kind, and damages each COUNT
times; it stops early after SECONDS. A process writes what it is about to decode before it does, so
that the last line says of what it died, or that it did not. Its end has a line after that.
"""

from __future__ import annotations

import asyncio
import base64
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from PIL import Image

WIDTH, HEIGHT, FRAMES = 48, 40, 6
RATE, SAMPLES = 8000, 2400
DONE = "decoded"
ENDED = "ended"
"""Begins the line with the exit code of a case; the code is negative for a signal."""
CASE_DEADLINE_SECONDS = 240
"""The kernel ends a case then, also in native code."""


def pixels(mode: str = "RGB", seed: int = 1) -> Image.Image:
    """A gradient with noise, so that decoders have something to do."""
    ramp = np.add.outer(np.arange(HEIGHT), np.arange(WIDTH)) * 2
    noise = np.random.default_rng(seed).integers(0, 60, (HEIGHT, WIDTH, 3))
    return Image.fromarray((ramp[..., None] + noise).clip(0, 255).astype(np.uint8)).convert(mode)


def saved(kind: str, image: Image.Image, **options: Any) -> bytes:
    with BytesIO() as file:
        image.save(file, kind, **options)
        return file.getvalue()


def images() -> Iterator[tuple[str, bytes]]:
    """At least one of each format of `IMAGE_FORMATS`, and of what its decoder has code for."""
    more = {"save_all": True, "append_images": [pixels(seed=2), pixels(seed=3)]}
    for kind in ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP"):
        yield kind, saved(kind, pixels())
    for kind in ("AVIF", "GIF", "PNG", "TIFF", "WEBP"):
        yield f"{kind} of several frames", saved(kind, pixels(), **more)
    for mode in ("L", "P", "1"):
        yield f"BMP {mode}", saved("BMP", pixels(mode))
    for mode in ("L", "1"):
        yield f"PPM {mode}", saved("PPM", pixels(mode))
    yield "PPM in letters", b"P3 4 4 255\n" + b"12 200 7 " * 16
    for mode in ("L", "CMYK"):
        yield f"JPEG {mode}", saved("JPEG", pixels(mode))
    yield "JPEG progressive", saved("JPEG", pixels(), progressive=True, optimize=True)
    yield "JPEG2000 stream", saved("JPEG2000", pixels(), no_jp2=True, tile_size=(16, 16))
    yield "JPEG2000 lossy", saved("JPEG2000", pixels("RGBA"), irreversible=True)
    for mode in ("RGBA", "LA", "P", "1", "I;16"):
        yield f"PNG {mode}", saved("PNG", pixels("L" if mode == "I;16" else mode).convert(mode))
    for compression in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg"):
        yield f"TIFF {compression}", saved("TIFF", pixels(), compression=compression)
    for compression in ("group3", "group4"):
        yield f"TIFF {compression}", saved("TIFF", pixels("1"), compression=compression)
    yield "TIFF CMYK", saved("TIFF", pixels("CMYK"), compression="tiff_lzw")
    yield "WEBP lossless", saved("WEBP", pixels("RGBA"), lossless=True)
    yield "WEBP alpha", saved("WEBP", pixels("RGBA"), quality=40)


def clips() -> Iterator[tuple[str, bytes]]:
    """What OpenCV can write."""
    import cv2

    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    with tempfile.TemporaryDirectory() as directory:
        for codec, container in (
            ("MJPG", "avi"),
            ("mp4v", "mp4"),
            ("mp4v", "mkv"),
            ("VP80", "webm"),
            ("VP90", "webm"),
            ("FLV1", "flv"),
            ("MPG1", "mpg"),
            ("MPG2", "ts"),
            ("WMV2", "wmv"),
            ("XVID", "avi"),
            ("FFV1", "mkv"),
            ("HFYU", "avi"),
        ):
            path = Path(directory, f"{codec}.{container}")
            writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*codec), 8, (WIDTH, HEIGHT))
            for seed in range(FRAMES):
                writer.write(np.asarray(pixels(seed=seed)))
            writer.release()
            if path.is_file() and path.stat().st_size > 500:
                yield f"{codec} in {container}", path.read_bytes()
    more = {"save_all": True, "append_images": [pixels(seed=seed) for seed in range(FRAMES)]}
    yield "GIF", saved("GIF", pixels(), **more)


def sounds() -> Iterator[tuple[str, bytes]]:
    """What libsndfile can write, of the containers that are allowed."""
    import soundfile  # type: ignore[import-untyped]  # it has no stubs

    wave = np.sin(np.arange(SAMPLES) / 7) * 0.5
    for container, codec in (
        ("WAV", "PCM_16"),
        ("WAV", "FLOAT"),
        ("WAV", "ULAW"),
        ("WAV", "IMA_ADPCM"),
        ("WAV", "MS_ADPCM"),
        ("AIFF", "PCM_16"),
        ("AIFF", "IMA_ADPCM"),
        ("CAF", "PCM_16"),
        ("CAF", "ALAC_16"),
        ("FLAC", "PCM_16"),
        ("OGG", "VORBIS"),
        ("OGG", "OPUS"),
        ("MP3", "MPEG_LAYER_III"),
    ):
        with BytesIO() as file:
            soundfile.write(file, wave, RATE, format=container, subtype=codec)
            yield f"{container} {codec}", file.getvalue()


KINDS: dict[str, Callable[[], Iterator[tuple[str, bytes]]]] = {
    "image": images,
    "video": clips,
    "audio": sounds,
}


def damaged(data: bytes, choose: random.Random) -> bytes:
    """A file that is cut off, or in which a few bits, bytes or blocks are wrong."""
    content = bytearray(data)
    if choose.random() < 0.2:
        del content[choose.randrange(len(content)) :]
    for _ in range(choose.choice((0, 1, 1, 2, 4, 16, 64)) if content else 0):
        at = choose.randrange(len(content))
        # Headers are a small part of a file, and most of what decoders trust.
        at = at if choose.random() < 0.5 else min(at, choose.randrange(128))
        match choose.randrange(5):
            case 0 | 1:
                content[at] ^= 1 << choose.randrange(8)
            case 2:
                content[at : at + 4] = choose.choice(
                    (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0", b"\x80\0\0\0")
                )
            case 3:
                del content[at : at + choose.randrange(1, 64)]
            case 4:
                content[at:at] = content[at : at + choose.randrange(1, 64)]
        if not content:
            break
    return bytes(content)


def decode(kind: str, data: bytes) -> None:
    """As a request has it decoded."""
    from vllm import envs
    from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

    connector = MEDIA_CONNECTOR_REGISTRY.load(envs.VLLM_MEDIA_CONNECTOR, allowed_media_domains=[])
    fetch = getattr(connector, f"fetch_{kind}_async")
    asyncio.run(fetch(f"data:{kind}/x;base64,{base64.b64encode(data).decode()}"))


def main() -> None:
    """Decode each case in a process of its own, and say how that ended."""
    from holdfast.engine.media.limits import guard_media

    guard_media(None)
    for case in sys.argv[1:]:
        pid = os.fork()
        if not pid:
            _decode_case(case)
        _, status = os.waitpid(pid, 0)
        say(f"{ENDED} {os.waitstatus_to_exitcode(status)}")


def _decode_case(case: str) -> NoReturn:
    signal.alarm(CASE_DEADLINE_SECONDS)
    kind, _, what = case.partition(" ")
    file = Path(what)
    try:
        if file.is_file():
            decode_or_refuse(kind, file.read_bytes())
        else:
            seed, count, seconds = what.split()
            decode_damaged(kind, seed, int(count), int(seconds))
        say(DONE)
    except BaseException:  # noqa: BLE001 - the outermost edge of a process
        traceback.print_exc()
        os._exit(1)
    # What a decoder's threads do while an interpreter ends is not of interest.
    os._exit(0)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def decode_damaged(kind: str, seed: str, most: int, seconds: int) -> None:
    files = list(KINDS[kind]())
    for name, data in files:
        say(f"whole {name}")
        decode(kind, data)
    ends = time.monotonic() + seconds
    for number in range(most):
        for name, data in files:
            if time.monotonic() > ends:
                return
            say(f"{number} {name}")
            decode_or_refuse(kind, damaged(data, random.Random(f"{seed} {number} {name}")))


def decode_or_refuse(kind: str, data: bytes) -> None:
    """Raise what vLLM would answer with 500, and nothing that it answers with 400."""
    from vllm.exceptions import VLLMClientError

    allowed: tuple[type[Exception], ...] = (VLLMClientError, ValueError, TypeError)
    if find_spec("av") is None:
        allowed = (*allowed, ImportError)  # vLLM asks PyAV for what libsndfile cannot read
    with suppress(*allowed):
        decode(kind, data)


if __name__ == "__main__":
    main()
