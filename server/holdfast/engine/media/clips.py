"""Counts the frames of a clip that vLLM's loader chooses, before they are decoded.

vLLM has a loader for each family of models, and a client may name another one. Many choose frames
by a rate and the length of the clip, whatever `num_frames` is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.multimodal.video_decoders import base, opencv

from holdfast.patches.patch import original, replace

MOST_FRAMES = 1 << 20
"""More than four hours have at 60 frames a second."""

_FRAME_PIXELS: ContextVar[int] = ContextVar("holdfast_frame_pixels", default=0)
"""The size of a frame of the clip that this thread decodes."""


def learn_frame_sizes() -> None:
    """Learn the size that each decoder checks before a loader chooses frames.

    A decoder that vLLM imports later takes the function from `base`. A second call changes nothing.
    """
    as_vllm = original(base, "check_frame_pixel_limit")

    def check_frame_pixel_limit(width: int, height: int) -> None:
        _FRAME_PIXELS.set(width * height)
        as_vllm(width, height)

    replace(base, "check_frame_pixel_limit", check_frame_pixel_limit)
    replace(opencv, "check_frame_pixel_limit", check_frame_pixel_limit)


def counting_loader(loader: Any, count: Callable[[int], None]) -> Any:
    """Return a loader that chooses as `loader` does, and passes the pixels it chose to `count`."""
    _FRAME_PIXELS.set(0)

    class CountingLoader(type(loader)):  # type: ignore[misc]  # vLLM is Any to us
        @classmethod
        def compute_frames_index_to_sample(
            cls, source: Any, target: Any, **options: Any
        ) -> list[int]:
            _check_numbers(source, target, options)
            chosen: list[int] = super().compute_frames_index_to_sample(source, target, **options)
            count(len(chosen) * _FRAME_PIXELS.get())
            return chosen

    counting = copy.copy(loader)  # one of the operator's own may have a state
    counting.__class__ = CountingLoader
    return counting


def _check_numbers(source: Any, target: Any, options: Mapping[str, Any]) -> None:
    """Refuse what would keep a loader choosing for minutes, or fill the memory with its choice.

    Loaders make lists as long as these numbers say, and a container may say anything, too.
    """
    counts = (source.total_frames_num, target.num_frames, *options.values())
    rates = (1, target.fps, options.get("max_fps"))
    numbers = [one for one in counts if isinstance(one, int | float)]
    numbers += [source.duration * one for one in rates if isinstance(one, int | float)]
    if not all(number <= MOST_FRAMES for number in numbers):  # NaN is neither more nor less
        raise VLLMValidationError(
            f"A clip may have at most {MOST_FRAMES} frames and last as many seconds, and "
            "media_io_kwargs may ask for no more frames than that."
        )
