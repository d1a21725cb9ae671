from __future__ import annotations

import re

from holdfast.telemetry.metrics import BY_NAME, FOLLOWER_METRICS, METRICS

ALL = (*METRICS, *FOLLOWER_METRICS)


def test_names_are_unique() -> None:
    """No family is in the table twice."""
    assert len(BY_NAME) == len(ALL)


def test_names_are_valid_and_prefixed() -> None:
    """Each name is one that Prometheus takes, and ours."""
    for metric in ALL:
        assert re.fullmatch(r"holdfast_[a-z][a-z_]*", metric.full_name)


def test_counters_and_only_counters_end_in_total() -> None:
    """The kind of a family shows in its name."""
    for metric in ALL:
        assert (metric.kind == "counter") == metric.name.endswith("_total")


def test_every_metric_is_explained_in_a_sentence() -> None:
    """The help of each family is a sentence on one line."""
    for metric in ALL:
        assert re.fullmatch(r"[A-Z0-9].+\.", metric.help)


def test_labels_identify_from_large_to_small() -> None:
    """A family with a rank names its engine first, so that series of one engine sort together."""
    for metric in ALL:
        if "rank" in metric.labels:
            assert metric.labels[:2] == ("engine", "rank")
