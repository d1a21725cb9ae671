"""The text of a family of metrics, of which only numbers are written anew.

Between two scrapes names, labels and help stay as they are, and so do most numbers. The library
writes a family once, whatever the format; from then on its lines are kept, and those whose number
has changed get another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Self

from prometheus_client import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

Encode = Callable[[Collector], bytes]
"""One of prometheus_client's encoders."""


class Form:
    """The lines of one family in one format."""

    def __init__(self, text: str, places: int) -> None:
        """From the text of a family whose samples are numbered in their order."""
        # Not splitlines: a label may hold what else that takes for the end of a line.
        self._lines = [f"{line}\n" for line in text.split("\n")[:-1]]
        self._line_of = [0] * places
        self._heads = [""] * places
        for number, line in enumerate(self._lines):
            if not line.startswith("#"):
                head, _, value = line.rpartition(" ")
                place = int(float(value))
                self._line_of[place], self._heads[place] = number, f"{head} "
        self._samples: list[Sample] = []
        self._numbers: Sequence[float] = tuple(map(float, range(places)))

    @classmethod
    def of(cls, family: Metric, encode: Encode) -> Self | None:
        """The form of a family; None if its lines hold more than a number each."""
        if any(sample[3:] != _BARE for sample in family.samples):
            return None
        numbered = copy.copy(family)
        numbered.samples = [
            Sample(sample.name, sample.labels, float(place))
            for place, sample in enumerate(family.samples)
        ]
        form = cls(text_of(numbered, encode), len(family.samples))
        form._samples = numbered.samples
        return form

    @property
    def places(self) -> int:
        """How many numbers it has."""
        return len(self._heads)

    def filled(self, samples: list[Sample]) -> list[str] | None:
        """The lines with the numbers of `samples`; None if this is not their form."""
        if len(samples) != len(self._samples):
            return None
        for sample, known in zip(samples, self._samples, strict=True):
            if sample != known and (sample[:2] != known[:2] or sample[3:] != _BARE):
                return None
        self._samples = samples
        return self.numbered([sample.value for sample in samples])

    def numbered(self, numbers: Sequence[float]) -> list[str]:
        """The lines with these numbers, one for each sample of the family, in their order.

        Raises:
            ValueError: there are more or fewer of them.
        """
        for place, (number, known) in enumerate(zip(numbers, self._numbers, strict=True)):
            if number != known:
                text = floatToGoString(number)  # type: ignore[no-untyped-call]  # to text
                self._lines[self._line_of[place]] = f"{self._heads[place]}{text}\n"
        self._numbers = numbers
        return self._lines


_BARE = Sample("", {}, 0.0)[3:]
"""Neither a timestamp nor an exemplar nor a native histogram."""


class _Single(Collector):
    def __init__(self, *families: Metric) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def text_of(family: Metric, encode: Encode) -> str:
    """One family, without what ends a page."""
    return encode(_Single(family)).decode().removesuffix(end_of(encode))


def end_of(encode: Encode) -> str:
    """What ends a page of this format."""
    return encode(_Single()).decode()
