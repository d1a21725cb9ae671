"""What vLLM's front end does for media that clients send or name: real sockets and decoders."""

from __future__ import annotations

import asyncio
import base64
import gc
import http.server
import ipaddress
import re
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from http import HTTPStatus
from importlib import import_module
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import psutil
import pytest
import vllm
from mistral_common.tokens.tokenizers import image as mistral_image
from PIL import Image
from vllm import envs
from vllm.entrypoints.speech_to_text.base import serving as speech_to_text
from vllm.exceptions import (
    GracefulHTTPError,
    VLLMClientError,
    VLLMUnprocessableEntityError,
    VLLMValidationError,
)
from vllm.multimodal import image as vllm_image
from vllm.multimodal import media as vllm_media
from vllm.multimodal import video_decoders
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.media.video import VideoMediaIO
from vllm.multimodal.video import VIDEO_LOADER_REGISTRY, VideoLoader

from holdfast.engine.media import budgets
from holdfast.engine.media.budgets import budgets_of_request
from holdfast.engine.media.limits import REDIRECTS_VARIABLE, guard_media
from holdfast.engine.media.public_fetch import FetchError, is_public, public_socket
from holdfast.patches.patch import is_replaced
from holdfast.request_context import REQUEST, RequestContext
from scripted_capacity import ScriptedCapacity

DEADLINE_SECONDS = 60
SESSION = (
    "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\n"
    "m=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n"
)
"""An FFmpeg that is given this opens two ports, and waits 10 s for what never comes."""


def picture(width: int = 8, height: int = 8, kind: str = "PNG") -> bytes:
    """An image of one colour."""
    with BytesIO() as file:
        Image.new("RGB", (width, height)).save(file, kind)
        return file.getvalue()


def as_data(content: bytes, kind: str = "image/png") -> str:
    """The URL that has it within."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


class _Host(http.server.BaseHTTPRequestHandler):
    """A host that a client may name."""

    asked: list[str]
    is_over: threading.Event

    def do_GET(self) -> None:
        """Answers each path in another way."""
        self.asked.append(self.path)
        if self.path in {"/picture", "/another"}:
            self._answer(200, picture())
        elif self.path == "/redirect":
            self.send_response(302)
            self.send_header("Location", "/picture")
            self.end_headers()
        elif self.path == "/pit":
            self.is_over.wait(DEADLINE_SECONDS)
        elif self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            with suppress(ConnectionError):
                while not self.is_over.is_set():
                    self.wfile.write(b"x" * 65536)
        else:
            self._answer(int(self.path[1:]), b"no picture")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: Any) -> None:
        """Nothing."""


@pytest.fixture
def host() -> Iterator[http.server.ThreadingHTTPServer]:
    """One on the loopback."""
    handler: Any = type("Host", (_Host,), {"asked": [], "is_over": threading.Event()})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        handler.is_over.set()
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What vLLM had before is there again afterwards."""
    monkeypatch.setattr(
        MEDIA_CONNECTOR_REGISTRY, "name2class", dict(MEDIA_CONNECTOR_REGISTRY.name2class)
    )
    monkeypatch.setattr(mistral_image, "download_image", vars(mistral_image)["download_image"])
    monkeypatch.setattr(vllm_image, "ALLOWED_IMAGE_FORMATS", vllm_image.ALLOWED_IMAGE_FORMATS)
    for module in (vllm_media.audio, speech_to_text):
        monkeypatch.setattr(module, "load_audio", module.load_audio)
    for module in (video_decoders.base, video_decoders.opencv):
        name = "check_frame_pixel_limit"
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.delenv(REDIRECTS_VARIABLE, raising=False)
    monkeypatch.setenv("VLLM_MEDIA_FETCH_MAX_RETRIES", "1")
    guard_media(None)
    yield
    gc.collect()


def connector(*domains: str) -> Any:
    """What vLLM makes for a message, or for all requests."""
    return MEDIA_CONNECTOR_REGISTRY.load(
        envs.VLLM_MEDIA_CONNECTOR, allowed_media_domains=list(domains)
    )


def fetched(url: str, *domains: str) -> Any:
    """The image of it."""
    return asyncio.run(connector(*domains).fetch_image_async(url))


def answer_for(url: str, *domains: str) -> str:
    """What the client is told."""
    with pytest.raises(VLLMUnprocessableEntityError) as caught:
        fetched(url, *domains)
    return str(caught.value)


def asked_of(host: http.server.ThreadingHTTPServer) -> list[str]:
    """The paths that it was asked for."""
    handler: Any = host.RequestHandlerClass
    return list(handler.asked)


def url_of(host: http.server.ThreadingHTTPServer, path: str) -> str:
    """Where it answers."""
    return f"http://127.0.0.1:{host.server_port}/{path}"


@pytest.mark.parametrize(
    "name",
    [
        "127.0.0.1",
        "localhost",
        "[::ffff:127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "0.0.0.0",  # noqa: S104 - asked, not bound
        "2130706433",
        "127.1",
        "0x7f.1",
        socket.gethostname(),
    ],
)
def test_no_host_of_ours_is_asked(host: http.server.ThreadingHTTPServer, name: str) -> None:
    """In whatever way it is written; on the loop and in a thread."""
    url = url_of(host, "picture").replace("127.0.0.1", name)
    told = answer_for(url)
    with pytest.raises(VLLMUnprocessableEntityError, match=r"Only public addresses") as caught:
        connector().fetch_image(url)
    assert str(caught.value) == told
    with pytest.raises(VLLMUnprocessableEntityError):
        vars(mistral_image)["download_image"](url, None)
    assert asked_of(host) == []


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1",
        "172.16.0.1",
        "192.168.0.1",
        "169.254.169.254",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "fe80::1",
        "fd00:ec2::254",
        "2002:7f00:1::",
        "::ffff:169.254.169.254",
    ],
)
def test_an_address_of_a_network_or_a_cloud_is_not_public(address: str) -> None:
    """Judged once more when it is connected to, so that no name can change in between."""
    assert not is_public(ipaddress.ip_address(address))
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with pytest.raises(PermissionError):
        public_socket((family, socket.SOCK_STREAM, 0, "", (address, 80)))


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946"])
def test_a_public_address_gets_a_socket(address: str) -> None:
    """Which connects nowhere yet."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with public_socket((family, socket.SOCK_STREAM, 0, "", (address, 80))) as made:
        assert made.family == family


def test_an_address_of_this_machine_is_not_public() -> None:
    """Though it may be one of the internet."""
    found = [one.address for all_of in psutil.net_if_addrs().values() for one in all_of]
    addresses = [one for one in found if one.count(".") == 3]
    assert addresses
    assert not any(is_public(ipaddress.ip_address(one)) for one in addresses)


def test_a_host_that_the_operator_lists_is_asked(host: http.server.ThreadingHTTPServer) -> None:
    """Wherever it is; on the loop and in a thread."""
    url = url_of(host, "picture")
    assert fetched(url, "127.0.0.1").size == (8, 8)
    assert connector("127.0.0.1").fetch_image(url).size == (8, 8)
    with pytest.raises(ValueError, match="allowed domains"):
        fetched(url.replace("127.0.0.1", "localhost"), "127.0.0.1")


def test_whatever_is_wrong_with_a_host_is_told_in_the_same_words(
    host: http.server.ThreadingHTTPServer,
) -> None:
    """A client learns neither hosts nor ports, and not what is behind them."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        told = {
            answer_for(url_of(host, path), "127.0.0.1")
            for path in ("200", "204", "403", "404", "500", "redirect")
        }
        told.add(answer_for(f"http://127.0.0.1:{port}/", "127.0.0.1"))
        told.add(answer_for("http://nowhere.invalid/", "nowhere.invalid"))
        told.add(answer_for(url_of(host, "picture")))
    assert len(told) == 1
    assert "127.0.0.1" not in told.pop()


def test_a_redirect_is_not_followed(host: http.server.ThreadingHTTPServer) -> None:
    """A host of the list could send us anywhere."""
    answer_for(url_of(host, "redirect"), "127.0.0.1")
    assert asked_of(host) == ["/redirect"]


def test_a_redirect_is_followed_where_the_operator_says_so(
    host: http.server.ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By vLLM's variable."""
    monkeypatch.setenv(REDIRECTS_VARIABLE, "1")
    guard_media(None)
    assert fetched(url_of(host, "redirect"), "127.0.0.1").size == (8, 8)


def test_a_tar_pit_is_left(
    host: http.server.ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All media of a request together, and not each after the other."""
    monkeypatch.setenv("VLLM_IMAGE_FETCH_TIMEOUT", "1")
    monkeypatch.setenv("VLLM_MEDIA_FETCH_MAX_RETRIES", "9")
    of_one_request = connector("127.0.0.1")

    async def all_of_them() -> list[Any]:
        REQUEST.set(RequestContext())
        urls = [url_of(host, "pit")] * 40
        loads = [of_one_request.fetch_image_async(url) for url in urls]
        async with asyncio.timeout(DEADLINE_SECONDS):
            return await asyncio.gather(*loads, return_exceptions=True)

    found = asyncio.run(all_of_them())
    assert {type(one) for one in found} == {VLLMUnprocessableEntityError}


def test_a_request_has_no_capacity_while_a_host_is_asked(
    host: http.server.ThreadingHTTPServer,
) -> None:
    """A host of tar pits keeps none from others; what came in the body is asked of nobody."""
    capacity = ScriptedCapacity()

    async def all_of_them() -> None:
        REQUEST.set(RequestContext("one", capacity=capacity))
        of_one_request = connector("127.0.0.1")
        await of_one_request.fetch_image_async(as_data(picture()))
        assert not capacity.said
        urls = [url_of(host, "picture")] * 3
        await asyncio.gather(*(of_one_request.fetch_image_async(url) for url in urls))

    asyncio.run(all_of_them())
    assert set(capacity.said[:-1]) == {"given"}
    assert capacity.said[-1] == "taken"


def test_no_more_is_read_than_a_request_may_fetch(
    host: http.server.ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a host that never ends: the limit on bytes is reached, not the one on time."""
    monkeypatch.setenv("VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB", "1")
    with pytest.raises(FetchError, match="larger than one request may fetch"):
        connector("127.0.0.1").connection.get_bytes(url_of(host, "endless"))


def test_vllms_budget_for_the_downloads_of_a_request_is_charged(
    host: http.server.ThreadingHTTPServer,
) -> None:
    """vLLM 0.33 gives each fetch one, which raises once it is used up."""
    left_bytes = [len(picture())]

    def charge(size: int) -> None:
        left_bytes[0] -= size
        if left_bytes[0] < 0:
            raise ValueError("exceeded")

    connection: Any = connector("127.0.0.1").connection
    fetch = partial(
        connection.get_bytes, url_of(host, "picture"), request_budget=SimpleNamespace(charge=charge)
    )
    assert fetch() == picture()
    assert left_bytes == [0]
    with pytest.raises(ValueError, match="exceeded"):
        fetch()


def test_a_query_with_many_documents_is_fetched_once(
    host: http.server.ThreadingHTTPServer,
) -> None:
    """Cross-encoders ask for it with each document, and it would be charged as often."""
    charged: list[int] = []

    def fetch_three_times() -> None:
        REQUEST.set(RequestContext("one"))
        connection: Any = connector("127.0.0.1").connection
        budget = SimpleNamespace(charge=charged.append)
        for _ in range(3):
            body = connection.get_bytes(url_of(host, "picture"), request_budget=budget)
            assert body == picture()

    copy_context().run(fetch_three_times)
    assert sum(charged) == len(picture())


def test_the_frames_of_a_clip_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of JPEG images is one, of as many as fit into a body."""
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", "10000")
    frame = base64.b64encode(picture(80, 80, "JPEG")).decode()
    with pytest.raises(VLLMValidationError):
        asyncio.run(
            connector().fetch_video_async("data:video/jpeg;base64," + ",".join([frame] * 9))
        )


CLIP_WIDTH, CLIP_HEIGHT = 64, 48
LOADERS = sorted(
    name
    for name in VIDEO_LOADER_REGISTRY.name2class
    if not VIDEO_LOADER_REGISTRY.backend_requires_gpu(name)
)


def clip(frames: int, frames_a_second: int = 8) -> bytes:
    """An AVI of as many frames."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "clip.avi")
        codec, size = cv2.VideoWriter.fourcc(*"MJPG"), (CLIP_WIDTH, CLIP_HEIGHT)
        writer = cv2.VideoWriter(str(file), codec, frames_a_second, size)
        for _ in range(frames):
            writer.write(np.zeros((CLIP_HEIGHT, CLIP_WIDTH, 3), np.uint8))
        writer.release()
        return file.read_bytes()


def with_header(content: bytes, seconds_a_frame: int, frames: int) -> bytes:
    """The same AVI, whose header says this of it."""
    stream = content.index(b"strh") + len("strh") + 4
    written = bytearray(content)
    struct.pack_into("<2I", written, stream + 20, seconds_a_frame, 1)
    struct.pack_into("<I", written, stream + 32, frames)
    return bytes(written)


def frames_of(content: bytes, asked: dict[str, Any]) -> Any:
    """What is decoded of a clip for a request of its own, as its `media_io_kwargs` ask."""

    async def fetch() -> Any:
        REQUEST.set(RequestContext())
        of_one = MEDIA_CONNECTOR_REGISTRY.load(
            envs.VLLM_MEDIA_CONNECTOR, media_io_kwargs={"video": asked}, allowed_media_domains=[]
        )
        return await of_one.fetch_video_async(as_data(content, "video/avi"))

    return asyncio.run(fetch())[0]


def allow_frames(monkeypatch: pytest.MonkeyPatch, frames: int) -> None:
    """Let a request hold as many frames of a clip."""
    pixels = frames * CLIP_WIDTH * CLIP_HEIGHT // budgets.FRAMES_OF_PIXELS
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", str(pixels))


@pytest.mark.parametrize("name", LOADERS)
def test_no_loader_decodes_more_frames_than_a_request_may_hold(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some choose by `fps` and not by `num_frames`."""
    loader: Any = VIDEO_LOADER_REGISTRY.name2class[name]
    decoded = []

    class Watched(loader):  # type: ignore[misc]  # vLLM is Any to us
        @classmethod
        def read_frames(cls, capture: Any, chosen: list[int], *args: Any, **options: Any) -> Any:
            decoded.append(len(chosen))
            return super().read_frames(capture, chosen, *args, **options)

    monkeypatch.setitem(VIDEO_LOADER_REGISTRY.name2class, name, Watched)
    content, asked = clip(40), {"video_backend": name, "num_frames": 20, "fps": 8}
    held = len(frames_of(content, asked))  # one loader repeats the last of an odd number
    wanted = decoded.pop()
    allow_frames(monkeypatch, wanted - 1)
    with pytest.raises(VLLMValidationError, match="pixels"):
        frames_of(content, asked)
    assert decoded == []
    allow_frames(monkeypatch, held)
    assert len(frames_of(content, asked)) == held


def test_clips_that_share_their_decoder_are_counted_apart() -> None:
    """vLLM's `/v1/systemone` has one for all clips of a request: nothing of a clip stays in it."""
    shared = VideoMediaIO(ImageMediaIO(), num_frames=4)
    before = shared.video_loader, shared.image_io

    async def fetch() -> Any:
        REQUEST.set(RequestContext())
        of_all = MEDIA_CONNECTOR_REGISTRY.load(envs.VLLM_MEDIA_CONNECTOR, allowed_media_domains=[])
        data = as_data(clip(8), "video/avi")
        return await asyncio.gather(*(of_all.load_from_url_async(data, shared) for _ in range(2)))

    assert len(asyncio.run(fetch())) == 2
    assert (shared.video_loader, shared.image_io) == before


def test_only_the_frames_of_a_clip_that_are_decoded_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute for Qwen3-VL is 120 frames, whatever the container has."""
    allow_frames(monkeypatch, 120)
    assert len(frames_of(clip(1800, 30), {"video_backend": "qwen3_vl", "fps": 2})) == 120


def test_the_frames_of_a_loader_that_vllm_does_not_know_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once they are decoded, for lack of a way to ask it before."""

    class Own(VideoLoader):  # type: ignore[misc]  # vLLM is Any to us
        @classmethod
        def load_bytes(cls, data: bytes, **_options: Any) -> Any:
            return np.zeros((len(data), CLIP_HEIGHT, CLIP_WIDTH, 3), np.uint8), {}

    monkeypatch.setitem(VIDEO_LOADER_REGISTRY.name2class, "own", Own)
    allow_frames(monkeypatch, 16)
    assert len(frames_of(b"GIF8" * 4, {"video_backend": "own"})) == 16
    with pytest.raises(VLLMValidationError, match="pixels"):
        frames_of(b"GIF8" * 5, {"video_backend": "own"})


@pytest.mark.parametrize(
    "asked",
    [
        {"video_backend": "openpangu", "fps": -1, "num_frames": 1e13},
        {"video_backend": "openpangu", "fps": -1, "num_frames": 10**13},
        {"video_backend": "glm5next", "fps": 1e9, "max_frames": 10**13},
        {"video_backend": "opencv_dynamic", "fps": 10**13},
        {"video_backend": "opencv_dynamic", "fps": 10**400},
        {"video_backend": "opencv_dynamic", "fps": float("nan")},
        {"video_backend": "qwen3_vl", "fps": float("inf")},
        {
            "video_backend": "molmo2",
            "frame_sample_mode": "fps",
            "sampling_fps": 16,
            "num_frames": 10**13,
        },
        {
            "video_backend": "molmo2",
            "frame_sample_mode": "uniform_last_frame",
            "max_fps": 10**13,
            "num_frames": 10**15,
        },
    ],
)
def test_no_loader_chooses_frames_without_end(asked: dict[str, Any]) -> None:
    """It would list them before it looks how many the clip has."""
    with pytest.raises(VLLMClientError):
        frames_of(clip(16, 16), asked)


@pytest.mark.parametrize(
    "asked",
    [
        {"num_frames": -1},
        {"video_backend": "embedding_gemma2", "fps": 60, "overflow_strategy": None},
    ],
)
@pytest.mark.parametrize("frames", [40, 2**31 - 1])
def test_a_header_does_not_keep_a_loader_choosing(asked: dict[str, Any], frames: int) -> None:
    """Its frames last for years, which also keeps vLLM from correcting their number."""
    content = with_header(clip(40), seconds_a_frame=10**8, frames=frames)
    with pytest.raises(VLLMValidationError, match="frames"):
        frames_of(content, asked)


def test_a_clip_whose_header_has_no_number_of_frames_is_served() -> None:
    """As many as vLLM finds are decoded: 0.32 takes the first one."""
    assert len(frames_of(with_header(clip(40), seconds_a_frame=1, frames=0), {})) >= 1


def test_a_decoder_that_is_imported_later_tells_the_size_of_its_frames(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client may name it, and it may take another stream of the container than OpenCV."""
    name = f"{video_decoders.__name__}.torchcodec"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(video_decoders, "torchcodec", None, raising=False)
    assert is_replaced(import_module(name), "check_frame_pixel_limit")


def test_the_frames_of_a_clip_count_as_long_as_it_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The images that it was made of are gone by then."""
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", "10000")
    frame = base64.b64encode(picture(80, 80, "JPEG")).decode()
    context = RequestContext()

    async def fetch() -> Any:
        REQUEST.set(context)
        clip = "data:video/jpeg;base64," + ",".join([frame] * 2)
        return await connector().fetch_video_async(clip)

    held = [asyncio.run(fetch())]
    with pytest.raises(VLLMValidationError, match="pixels"):
        asyncio.run(fetch())
    held.pop()
    gc.collect()
    assert asyncio.run(fetch())[0].shape == (2, 80, 80, 3)


def test_all_requests_have_a_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is for as long as the images are held; who comes beyond is told to come back."""
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", "10000")
    guard_media(None)
    url = as_data(picture(80, 80))
    held = [asyncio.run(connector().fetch_image_async(url)) for _ in range(9)]
    with pytest.raises(GracefulHTTPError) as caught:
        asyncio.run(connector().fetch_image_async(url))
    assert caught.value.http_status == HTTPStatus.TOO_MANY_REQUESTS
    held.pop()
    gc.collect()
    assert fetched(url).size == (80, 80)


@pytest.mark.parametrize("kind", ["ICO", "ICNS", "TGA", "PCX", "SGI"])
def test_what_no_client_sends_is_not_decoded(kind: str) -> None:
    """vLLM has its decoders at hand for some thirty formats."""
    content = picture(16, 16, kind)
    with pytest.raises(ValueError, match="identify"):
        fetched(as_data(content))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_what_clients_send_is_decoded(kind: str) -> None:
    """As vLLM does it."""
    content = picture(16, 16, kind)
    assert fetched(as_data(content)).size == ImageMediaIO().load_bytes(content).media.size


@pytest.mark.parametrize(
    "content",
    [
        SESSION,
        "ffconcat version 1.0\nfile clip.mp4\n",
        "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://127.0.0.1/\n#EXT-X-ENDLIST\n",
        "",
    ],
)
def test_ffmpeg_is_not_given_what_names_other_sources(content: str) -> None:
    """It would open files and ports, or wait without end."""
    url = as_data(content.encode(), "video/mp4")
    for load in (connector().fetch_video_async, connector().fetch_audio_async):
        with pytest.raises(VLLMValidationError, match="container"):
            asyncio.run(asyncio.wait_for(load(url), DEADLINE_SECONDS))
    with pytest.raises(VLLMValidationError, match="container"):
        speech_to_text.load_audio(BytesIO(content.encode()), sr=16000)


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        ("image", {"image_mode": 5}),
        ("image", {"image_mode": {"a": 1}}),
        ("image", {"rgba_background_color": "x"}),
        ("video", {"num_frames": "x"}),
        ("video", {"num_frames": [1]}),
        ("video", {"fps": "x", "num_frames": 2}),
        ("video", {"video_backend": 5}),
        ("video", {"video_backend": ["opencv"]}),
    ],
)
def test_media_that_cannot_be_read_as_asked_are_the_fault_of_the_client(
    kind: str, asked: dict[str, Any]
) -> None:
    """Any value of JSON may stand there; vLLM answers ValueError and TypeError with 400."""
    of_one = MEDIA_CONNECTOR_REGISTRY.load(
        envs.VLLM_MEDIA_CONNECTOR, media_io_kwargs={kind: asked}, allowed_media_domains=[]
    )
    fetch = of_one.fetch_image_async if kind == "image" else of_one.fetch_video_async
    url = as_data(picture())
    if kind == "video":
        url = as_data(b"GIF89a" + picture(8, 8, "GIF")[6:], "video/mp4")
    with pytest.raises((VLLMClientError, ValueError, TypeError)):
        asyncio.run(fetch(url))


def test_a_video_of_large_frames_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what its header says."""
    file = tmp_path / "clip.avi"
    codec = cv2.VideoWriter.fourcc(*"MJPG")
    writer = cv2.VideoWriter(str(file), codec, 8, (160, 120))
    for _ in range(8):
        writer.write(np.zeros((120, 160, 3), np.uint8))
    writer.release()
    url = as_data(file.read_bytes(), "video/avi")
    frames, _ = asyncio.run(connector().fetch_video_async(url))
    assert frames.shape[1:] == (120, 160, 3)
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", "50000")
    with pytest.raises(VLLMValidationError, match="pixels"):
        asyncio.run(connector().fetch_video_async(url))


def test_vllm_fetches_by_no_other_way() -> None:
    """A client of HTTP that a new vLLM adds to the front end is to be looked at."""
    package = Path(vllm.__file__).parent
    calls = re.compile(r"ClientSession\(|\brequests\.(get|post|Session)\(|urlopen\(|\bhttpx\.")
    folders = ("renderers", "multimodal", "tokenizers", "parser", "tool_parsers", "reasoning")
    paths = [path for folder in folders for path in (package / folder).rglob("*.py")]
    served = package / "entrypoints"
    paths += [path for path in served.rglob("*.py") if path.parent.name != "launchers"]
    found = {str(path.relative_to(package)) for path in paths if calls.search(path.read_text())}
    assert found == KNOWN_CLIENTS


KNOWN_CLIENTS = {"entrypoints/mcp/tool_server.py"}
"""Asks the tool servers that the operator names, and none that a client does."""


def test_the_time_of_a_request_is_that_of_its_fetches(
    host: http.server.ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of the server or of a connector, and not what it does between them."""
    now_seconds = [0.0]
    monkeypatch.setattr(budgets, "time", SimpleNamespace(monotonic=lambda: now_seconds[0]))
    of_all, url = connector("127.0.0.1"), url_of(host, "picture")

    async def fetch_late(context: RequestContext) -> None:
        REQUEST.set(context)
        with budgets_of_request().fetching(15) as left_seconds:
            assert left_seconds == 15
            now_seconds[0] += 14
        now_seconds[0] += 3600
        await of_all.fetch_image_async(url)
        with budgets_of_request().fetching(15) as left_seconds:
            assert left_seconds == 1

    for key in ("a", "b"):
        asyncio.run(fetch_late(RequestContext(key=key)))


def test_time_is_up_for_all_connectors_of_a_request(host: http.server.ThreadingHTTPServer) -> None:
    """A chat has one for each message; another request has its own time."""

    async def fetch(context: RequestContext) -> Any:
        REQUEST.set(context)
        return await connector("127.0.0.1").fetch_image_async(url_of(host, "picture"))

    context = RequestContext()
    asyncio.run(fetch(context))
    context.media._fetched_seconds = 3600.0
    with pytest.raises(VLLMUnprocessableEntityError):
        asyncio.run(fetch(context))
    asyncio.run(fetch(RequestContext()))


def test_pixels_of_all_connectors_of_a_request_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as they are held; another request has its own."""
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", "10000")
    url = as_data(picture(80, 80))

    async def fetch(context: RequestContext) -> Any:
        REQUEST.set(context)
        return await connector().fetch_image_async(url)

    context = RequestContext()
    held = [asyncio.run(fetch(context)) for _ in range(3)]
    with pytest.raises(VLLMValidationError, match="pixels"):
        asyncio.run(fetch(context))
    assert asyncio.run(fetch(RequestContext())).size == (80, 80)
    held.pop()
    gc.collect()
    assert asyncio.run(fetch(context)).size == (80, 80)


def test_an_image_is_fetched_in_a_thread_within_the_budgets_of_its_request(
    host: http.server.ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As scores are, by one connector for each document."""
    monkeypatch.setenv("VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB", "1")
    context = RequestContext()

    async def fetch(path: str) -> Any:
        REQUEST.set(context)
        url = url_of(host, path)
        return await asyncio.to_thread(lambda: connector("127.0.0.1").fetch_image(url))

    assert asyncio.run(fetch("picture")).size == (8, 8)
    assert context.media.bytes.try_take(budgets.MIB - len(picture()))
    with pytest.raises(VLLMUnprocessableEntityError):
        asyncio.run(fetch("another"))
