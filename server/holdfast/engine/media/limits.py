"""Bounds how many decoded pixels the media of one request, and of all requests, may hold.

vLLM 0.32 bounds one image, one clip, one download. But a body of 32 MB has room for sixty images of
half a gigabyte each once decoded, so the totals have bounds too, checked before anything is
decoded.

Every failure of a URL gets the same response, so that a client cannot learn which hosts and ports
exist.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import struct
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
from yarl import URL

from holdfast.engine.media.budgets import MediaBudget, budgets_of_request, pixels_a_request
from holdfast.engine.media.clips import counting_loader, learn_frame_sizes
from holdfast.engine.media.formats import (
    IMAGE_FORMATS,
    check_audio,
    check_container,
    read_clips_safely,
)
from holdfast.engine.media.public_fetch import PublicConnection
from holdfast.engine.unsupported import is_on
from holdfast.engine.vllm_errors import capacity_lent

logger = logging.getLogger("holdfast.media")

REDIRECTS_VARIABLE = "VLLM_MEDIA_URL_ALLOW_REDIRECTS"
NAMES_AT_ONCE = 16
"""Concurrent look-ups by the system's resolver, each of which may take 30 s."""
REQUESTS_OF_PIXELS = 3
"""All requests together may hold as many pixels as this many of the largest requests."""

_FETCH_MESSAGE = (
    "The media at the URL could not be fetched or decoded. Only public addresses are allowed, "
    "unless the operator lists domains (--allowed-media-domains)."
)
_FETCH_FAILURES = (aiohttp.ClientError, OSError, ValueError, RuntimeError, VLLMClientError)
"""What fetching and decoding raise; TimeoutError is an OSError."""
_DECODING_FAILURES = (
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
"""What decoders also raise for damaged content and for values of a wrong type."""
_CAUSE_CHARACTERS = 200
_DEFAULT_CONNECTOR = "http"
"""The connector that vLLM uses unless VLLM_MEDIA_CONNECTOR names another."""


def guard_media(allowed_domains: Sequence[str] | None) -> None:
    """Have vLLM's front end fetch only from public addresses, and hold no more than it can."""
    pixels = MediaBudget(REQUESTS_OF_PIXELS * pixels_a_request())
    names = ThreadPoolExecutor(NAMES_AT_ONCE, thread_name_prefix="holdfast-names")
    follows = is_on(REDIRECTS_VARIABLE, os.environ)

    connector_of = partial(
        GuardedConnector, names=names, pixels_of_all=pixels, follows_redirects=follows
    )
    MEDIA_CONNECTOR_REGISTRY.register(_DEFAULT_CONNECTOR)(connector_of)
    vllm_image.ALLOWED_IMAGE_FORMATS = IMAGE_FORMATS

    def download_image(url: str, timeout: Any) -> Image.Image:  # noqa: ARG001 - mistral-common's name
        connector = connector_of(allowed_media_domains=list(allowed_domains or ()))
        image: Image.Image = connector.fetch_image(url, image_mode=None).media
        return image

    # Mistral's tokenizer itself fetches an image that vLLM has already fetched.
    mistral_image.download_image = download_image  # type: ignore[attr-defined]  # it imports it too
    check_audio()
    read_clips_safely()
    learn_frame_sizes()


class GuardedConnector(MediaConnector):  # type: ignore[misc]  # vLLM is Any to us
    """vLLM's connector for media, within the budgets of the request that is served."""

    def __init__(
        self,
        *args: Any,
        names: ThreadPoolExecutor,
        pixels_of_all: MediaBudget,
        follows_redirects: bool,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.connection = PublicConnection(
            names, is_listed=bool(self.allowed_media_domains), follows_redirects=follows_redirects
        )
        self._pixels_of_all = pixels_of_all

    async def fetch_audio_async(self, *args: Any, **options: Any) -> Any:
        """Decode as vLLM does; see `_decoding_errors`."""
        with _decoding_errors():
            return await super().fetch_audio_async(*args, **options)

    async def fetch_image_async(self, *args: Any, **options: Any) -> Any:
        """Decode as vLLM does; see `_decoding_errors`."""
        with _decoding_errors():
            return await super().fetch_image_async(*args, **options)

    async def fetch_video_async(self, *args: Any, **options: Any) -> Any:
        """Decode as vLLM does; see `_decoding_errors`."""
        with _decoding_errors():
            return await super().fetch_video_async(*args, **options)

    def load_from_url(self, url: str, media_io: Any, *, fetch_timeout: int | None = None) -> Any:
        """As vLLM's, within bounds, and with the same error for every failure of a host."""
        bounded = self._bounded(media_io)
        if not self._is_fetched(url):
            return super().load_from_url(url, bounded, fetch_timeout=fetch_timeout)
        with _fetch_errors(url):
            return super().load_from_url(url, bounded, fetch_timeout=fetch_timeout)

    async def load_from_url_async(
        self, url: str, media_io: Any, *, fetch_timeout: int | None = None
    ) -> Any:
        """As `load_from_url`; during a fetch, the request uses no capacity of the engine."""
        bounded = self._bounded(media_io)
        if not self._is_fetched(url):
            return await super().load_from_url_async(url, bounded, fetch_timeout=fetch_timeout)
        async with capacity_lent():
            with _fetch_errors(url):
                return await super().load_from_url_async(url, bounded, fetch_timeout=fetch_timeout)

    def _is_fetched(self, url: str) -> bool:
        """Whether a host has to be asked for it; ValueError if that host is not allowed."""
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
        pixels = _Pixels(budgets_of_request().pixels, self._pixels_of_all)
        if isinstance(media_io, VideoMediaIO):
            # `/v1/systemone` has one for all clips of a request (0.32).
            media_io = copy.copy(media_io)
            # A clip may be a list of images.
            media_io.image_io = BoundedMediaIO(media_io.image_io, pixels, is_frame=True)
        return BoundedMediaIO(media_io, pixels)


class _Pixels:
    """The pixels of one medium, in the budgets of its request and of all requests."""

    def __init__(self, of_one: MediaBudget, of_all: MediaBudget) -> None:
        self._of_one = of_one
        self._of_all = of_all
        self.held = 0

    def take(self, pixels: int) -> None:
        """Count pixels for this request, and for all requests.

        Raises:
            VLLMValidationError: this request has too many.
            GracefulHTTPError: all requests together have too many.
        """
        if not self._of_one.try_take(pixels):
            raise VLLMValidationError(
                f"The media of the request have more than {self._of_one.most} pixels at a time."
            )
        if not self._of_all.try_take(pixels):
            self._of_one.give_back(pixels)
            raise GracefulHTTPError(
                "The server is decoding too many large images. Please try again later.",
                HTTPStatus.TOO_MANY_REQUESTS,
            )
        self.held += pixels

    def give_back(self) -> None:
        """Give back all that were taken."""
        self._of_one.give_back(self.held)
        self._of_all.give_back(self.held)
        self.held = 0


class BoundedMediaIO:
    """Wraps vLLM's MediaIO for images or clips to count pixels before it decodes them."""

    def __init__(self, media_io: Any, pixels: _Pixels, *, is_frame: bool = False) -> None:
        """Take the budgets, because a thread decodes, which has no request.

        A frame (`is_frame`) is copied into its clip, which gives the pixels back.
        """
        self._media_io = media_io
        self._pixels = pixels
        self._is_frame = is_frame

    def get_max_bytes(self) -> int | None:
        """Return the largest size of one, before it is decoded."""
        most: int | None = self._media_io.get_max_bytes()
        return most

    def load_bytes(self, data: bytes) -> Any:
        if not isinstance(self._media_io, ImageMediaIO):
            check_container(data)
        with _decoding_errors(RuntimeError, Image.DecompressionBombError):
            return self._holding(lambda: self._counted(data))

    def load_base64(self, media_type: str, data: str) -> Any:
        is_list = media_type.lower() == "video/jpeg"
        if is_list and isinstance(self._media_io, VideoMediaIO):
            return self._holding(lambda: self._media_io.load_base64(media_type, data))
        if (most := self.get_max_bytes()) is not None and len(data) > 2 * most:
            raise VLLMValidationError(f"The media is larger than {most} bytes.")
        return self.load_bytes(pybase64.b64decode(data, validate=True))

    def load_file(self, filepath: Path) -> Any:
        return self._media_io.load_file(filepath)

    def _counted(self, data: bytes) -> Any:
        held = self._pixels.held

        def count(pixels: int) -> None:
            self._pixels.take(max(0, held + pixels - self._pixels.held))

        if isinstance(self._media_io, VideoMediaIO):
            self._media_io.video_loader = counting_loader(self._media_io.video_loader, count)
        elif isinstance(self._media_io, ImageMediaIO):
            count(_pixels_by_header(data))
        loaded = self._media_io.load_bytes(data)
        # A header need not tell the truth, and a loader may be one of the operator's own.
        count(_decoded_pixels(getattr(loaded, "media", None)))
        return loaded

    def _holding(self, load: Callable[[], Any]) -> Any:
        """Load a medium, and give its pixels back when nobody has it any more."""
        if self._is_frame:
            return load()
        try:
            loaded = load()
        except BaseException:
            self._pixels.give_back()
            raise
        media = getattr(loaded, "media", None)
        frames = media[0] if isinstance(media, tuple) else media
        if frames is None:
            self._pixels.give_back()
        else:
            weakref.finalize(frames, self._pixels.give_back)
        return loaded


def _pixels_by_header(image: bytes) -> int:
    """Return how many pixels an image has, by its header; 0 if that is damaged."""
    with suppress(OSError, ValueError), open_image(BytesIO(image)) as opened:
        return int(opened.width * opened.height)
    return 0


def _decoded_pixels(media: Any) -> int:
    """Return how many pixels an image or a clip has; 0 for other media."""
    if isinstance(media, Image.Image):
        return media.width * media.height
    shape = getattr(media[0], "shape", ()) if isinstance(media, tuple) else ()
    is_clip = len(shape) == len(("frames", "height", "width", "channels"))
    return math.prod(shape[:-1]) if is_clip else 0


@contextmanager
def _decoding_errors(*more: type[Exception]) -> Iterator[None]:
    """Turn what vLLM and its decoders raise for a medium or for `media_io_kwargs` into 400.

    A request may pass any JSON value, which they use without a check (0.32).
    """
    try:
        yield
    except _DECODING_FAILURES + more as error:
        cause = " ".join(str(error).split())[:_CAUSE_CHARACTERS]
        logger.warning("cannot decode media: %s: %s", type(error).__name__, cause)
        raise VLLMValidationError(
            "The media of the request cannot be decoded, or not with these media_io_kwargs."
        ) from error


@contextmanager
def _fetch_errors(url: str) -> Iterator[None]:
    try:
        yield
    except _FETCH_FAILURES as error:
        cause = " ".join(str(error).split())[:_CAUSE_CHARACTERS] or type(error).__name__
        logger.warning("could not fetch media from %s: %s", parse_url(url).hostname, cause)
        raise VLLMUnprocessableEntityError(_FETCH_MESSAGE, parameter="url") from error
