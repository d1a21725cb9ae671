"""How vLLM's front end comes by the media that clients send or name, and how much of them it holds.

vLLM 0.32 bounds one image, one clip, one download. A body of 32 MB has room for sixty images that
are half a gigabyte each once they are decoded, so all of a request, and of all requests, have a
bound too, that is kept before anything is decoded.

Every failure of a URL gets the same answer, so that a client cannot learn which hosts and ports
exist.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from http import HTTPStatus
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pybase64
from mistral_common.tokens.tokenizers import image as mistral_image
from PIL import Image
from urllib3.util import parse_url
from vllm import envs
from vllm.exceptions import (
    GracefulHTTPError,
    VLLMClientError,
    VLLMUnprocessableEntityError,
    VLLMValidationError,
)
from vllm.multimodal import image as vllm_image
from vllm.multimodal.image import open_image
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.media.video import VideoMediaIO
from vllm.multimodal.video_decoders.opencv import OpenCVVideoBackendMixin
from yarl import URL

from holdfast.engine.media.formats import IMAGE_FORMATS, check_audio, check_container
from holdfast.engine.media.public_fetch import PublicConnection
from holdfast.engine.unsupported import is_on
from holdfast.patches.absence import away_from_engine

logger = logging.getLogger("holdfast.media")

REDIRECTS_VARIABLE = "VLLM_MEDIA_URL_ALLOW_REDIRECTS"
NAMES_AT_ONCE = 16
"""Looked up by the resolver of the system, which takes up to 30 s for one."""
FRAMES_OF_PIXELS = 2
"""One request may hold this many of the largest image: 1 GiB, or 32 frames of 4K."""
REQUESTS_OF_PIXELS = 3
"""All requests together may hold as many decoded pixels as this many of the largest."""

_UNFETCHED = (
    "The media at the URL could not be fetched or decoded. Only public addresses are allowed, "
    "unless the operator lists domains (--allowed-media-domains)."
)
_FAILURES = (aiohttp.ClientError, OSError, ValueError, RuntimeError, VLLMClientError)
"""What fetching and decoding raise; a TimeoutError is an OSError."""
_WRONG = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    SyntaxError,
    TypeError,
    struct.error,
    zlib.error,
)
"""What decoders raise, beside those, of damaged content and of values of a wrong type."""
_CAUSE_CHARACTERS = 200
_WIDTH_HEIGHT_FRAMES = (3, 4, 7)
"""`CAP_PROP_FRAME_WIDTH` and so on of OpenCV, which may be missing."""
_STOCK = "http"
"""The connector that vLLM uses unless VLLM_MEDIA_CONNECTOR names another."""


def guard_media(allowed_domains: Sequence[str] | None) -> None:
    """Have vLLM's front end fetch from public addresses alone, and hold no more than it can."""
    pixels = Pixels(REQUESTS_OF_PIXELS * _pixels_a_request())
    names = ThreadPoolExecutor(NAMES_AT_ONCE, thread_name_prefix="holdfast-names")
    follows = is_on(REDIRECTS_VARIABLE, os.environ)

    connector_of = partial(
        GuardedConnector, names=names, pixels_of_all=pixels, follows_redirects=follows
    )
    MEDIA_CONNECTOR_REGISTRY.register(_STOCK)(connector_of)
    vllm_image.ALLOWED_IMAGE_FORMATS = IMAGE_FORMATS

    def download_image(url: str, timeout: Any) -> Image.Image:  # noqa: ARG001 - mistral-common's name
        connector = connector_of(allowed_media_domains=list(allowed_domains or ()))
        image: Image.Image = connector.fetch_image(url, image_mode=None).media
        return image

    # Mistral's tokenizer fetches an image again, which vLLM has fetched already, by itself.
    mistral_image.download_image = download_image  # type: ignore[attr-defined]  # it imports it too
    check_audio()


class Pixels:
    """Counts the pixels of images that are decoded now."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0
        self._lock = threading.Lock()

    def has_taken(self, pixels: int) -> bool:
        """Take this many more if there is room, and tell whether; they count until given back."""
        with self._lock:
            has_room = self._most <= 0 or self._held + pixels <= self._most
            self._held += pixels if has_room else 0
            return has_room

    def give_back(self, pixels: int) -> None:
        with self._lock:
            self._held -= pixels


class GuardedConnector(MediaConnector):  # type: ignore[misc]  # vLLM is Any to us
    """For the media of one request, as vLLM makes one for each."""

    def __init__(
        self,
        *args: Any,
        names: ThreadPoolExecutor,
        pixels_of_all: Pixels,
        follows_redirects: bool,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.connection = PublicConnection(
            names, is_listed=bool(self.allowed_media_domains), follows_redirects=follows_redirects
        )
        self.pixels_of_all = pixels_of_all
        self._pixels = Pixels(_pixels_a_request())

    async def fetch_audio_async(self, *args: Any, **options: Any) -> Any:
        """As vLLM's, see `_as_asked`."""
        with _as_asked():
            return await super().fetch_audio_async(*args, **options)

    async def fetch_image_async(self, *args: Any, **options: Any) -> Any:
        """As vLLM's, see `_as_asked`."""
        with _as_asked():
            return await super().fetch_image_async(*args, **options)

    async def fetch_video_async(self, *args: Any, **options: Any) -> Any:
        """As vLLM's, see `_as_asked`."""
        with _as_asked():
            return await super().fetch_video_async(*args, **options)

    def load_from_url(self, url: str, media_io: Any, *, fetch_timeout: int | None = None) -> Any:
        """As vLLM's, within bounds; one error for whatever is wrong with a host."""
        bounded = self._bounded(media_io)
        if not self._is_fetched(url):
            return super().load_from_url(url, bounded, fetch_timeout=fetch_timeout)
        with _one_error(url):
            return super().load_from_url(url, bounded, fetch_timeout=fetch_timeout)

    async def load_from_url_async(
        self, url: str, media_io: Any, *, fetch_timeout: int | None = None
    ) -> Any:
        """As `load_from_url`; while a host is asked, the request has no place in the engine."""
        bounded = self._bounded(media_io)
        if not self._is_fetched(url):
            return await super().load_from_url_async(url, bounded, fetch_timeout=fetch_timeout)
        async with away_from_engine():
            with _one_error(url):
                return await super().load_from_url_async(url, bounded, fetch_timeout=fetch_timeout)

    def _is_fetched(self, url: str) -> bool:
        """Whether a host is asked for it; ValueError if that is none of those that are listed."""
        if url[:5].lower() == "data:":
            return False
        named = parse_url(url)
        if not (named.scheme or "").startswith("http"):
            return False
        self._assert_url_in_allowed_media_domains(named)
        if self.allowed_media_domains and URL(named.url).host != named.hostname:
            raise VLLMValidationError("The URL is ambiguous.")
        return True

    def _bounded(self, media_io: Any) -> Any:
        if isinstance(media_io, VideoMediaIO):
            # A clip may be a list of images.
            media_io.image_io = Bounded(media_io.image_io, self)
        return Bounded(media_io, self)

    def take(self, pixels: int) -> None:
        """Count them as held by this request, and among those of all.

        Raises:
            VLLMValidationError: the request has too many; GracefulHTTPError: all have.
        """
        if not self._pixels.has_taken(pixels):
            raise VLLMValidationError(
                f"The media of the request have more than {_pixels_a_request()} pixels in total."
            )
        if not self.pixels_of_all.has_taken(pixels):
            raise GracefulHTTPError(
                "The server is decoding too many large images. Please try again later.",
                HTTPStatus.SERVICE_UNAVAILABLE,
            )


class Bounded:
    """A MediaIO of vLLM's for images or clips that counts pixels before it decodes them."""

    def __init__(self, media_io: Any, connector: GuardedConnector) -> None:
        self._media_io = media_io
        self._connector = connector

    def get_max_bytes(self) -> int | None:
        """Most bytes of one, before it is decoded."""
        most: int | None = self._media_io.get_max_bytes()
        return most

    def load_bytes(self, data: bytes) -> Any:
        if not isinstance(self._media_io, ImageMediaIO):
            check_container(data)
        pixels = pixels_of(self._media_io, data)
        return self._counted(pixels, lambda: self._media_io.load_bytes(data))

    def load_base64(self, media_type: str, data: str) -> Any:
        is_list = media_type.lower() == "video/jpeg"
        if is_list and isinstance(self._media_io, VideoMediaIO):
            return self._media_io.load_base64(media_type, data)
        if (most := self.get_max_bytes()) is not None and len(data) > 2 * most:
            raise VLLMValidationError(f"The media is larger than {most} bytes.")
        return self.load_bytes(pybase64.b64decode(data, validate=True))

    def load_file(self, filepath: Path) -> Any:
        return self._media_io.load_file(filepath)

    def _counted(self, pixels: int, load: Callable[[], Any]) -> Any:
        self._connector.take(pixels)
        held = [pixels]
        give_back = partial(_give_back, self._connector.pixels_of_all, held)
        try:
            loaded = load()
            media = getattr(loaded, "media", None)
            if isinstance(media, Image.Image) and (more := media.width * media.height - pixels) > 0:
                # What a file says at its beginning need not be what is in it.
                self._connector.take(more)
                held.append(more)
        except BaseException:
            give_back()
            raise
        frames = media[0] if isinstance(media, tuple) else media
        if frames is None:
            give_back()
        else:
            weakref.finalize(frames, give_back)
        return loaded


def pixels_of(media_io: Any, data: bytes) -> int:
    """How many it would decode, by what the file says at its beginning; 0 if that is wrong."""
    if isinstance(media_io, ImageMediaIO):
        with suppress(OSError, ValueError), open_image(BytesIO(data)) as image:
            return int(image.width * image.height)
    if isinstance(media_io, VideoMediaIO):
        with suppress(OSError, ValueError, ImportError):
            capture = OpenCVVideoBackendMixin.open_video_capture(data)
            # It is not released: OpenCV 5.0 lets go of `data` then without the lock of the
            # interpreter, which is SIGSEGV.
            width, height, frames = (int(capture.get(one)) for one in _WIDTH_HEIGHT_FRAMES)
            kept = media_io.num_frames
            return max(0, width * height * (min(frames, kept) if kept > 0 else frames))
    return 0


def _give_back(pixels: Pixels, held: list[int]) -> None:
    pixels.give_back(sum(held))


def _pixels_a_request() -> int:
    return FRAMES_OF_PIXELS * int(envs.VLLM_MAX_IMAGE_PIXELS)


@contextmanager
def _as_asked() -> Iterator[None]:
    """Have what a medium, or `media_io_kwargs`, makes vLLM and its decoders fail on be a 400.

    A request may give them any value of JSON, and they take it for what they need (0.32).
    """
    try:
        yield
    except _WRONG as error:
        cause = " ".join(str(error).split())[:_CAUSE_CHARACTERS]
        logger.warning("cannot decode media: %s: %s", type(error).__name__, cause)
        raise VLLMValidationError(
            "The media of the request cannot be decoded, or not with these media_io_kwargs."
        ) from error


@contextmanager
def _one_error(url: str) -> Iterator[None]:
    try:
        yield
    except _FAILURES as error:
        cause = " ".join(str(error).split())[:_CAUSE_CHARACTERS] or type(error).__name__
        logger.warning("could not fetch media from %s: %s", parse_url(url).hostname, cause)
        raise VLLMUnprocessableEntityError(_UNFETCHED, parameter="url") from error
