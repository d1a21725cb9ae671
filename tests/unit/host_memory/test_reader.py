"""What is left is read from the host and from each cgroup that bounds this process."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fake_host import GIB, MIB, FakeHost
from holdfast.host_memory.guard import INTERVAL_SECONDS
from holdfast.host_memory.reader import Bound, memory_reader
from memory_cgroups import memory_cgroup
from traced_memory import least_memory

HOST = Bound(100 * GIB, 40 * GIB)


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    """A host that has 40 of 100 GiB left."""
    fake = FakeHost(tmp_path)
    fake.leave(40 * GIB)
    return fake


def bounds(host: FakeHost) -> list[Bound]:
    """What a new reader finds."""
    with memory_reader(host.root) as reader:
        return reader.bounds()


def test_the_host_says_what_is_available(host: FakeHost) -> None:
    """MemAvailable counts, which includes the page cache, and not what is free."""
    assert bounds(host) == [HOST]


def test_each_reading_is_new(host: FakeHost) -> None:
    """The files stay open, and what they say now is read."""
    with memory_reader(host.root) as reader:
        reader.bounds()
        host.leave(2 * GIB)
        assert reader.bounds() == [Bound(100 * GIB, 2 * GIB)]


def test_a_group_and_the_one_above_it_bound_too(host: FakeHost) -> None:
    """Each with its own limit; what the kernel can reclaim is available."""
    host.join("0::/pod/container")
    host.bound("pod/container", str(8 * GIB), 6 * GIB, cached_bytes=GIB)
    host.bound("pod", str(9 * GIB), 8 * GIB)
    assert bounds(host) == [HOST, Bound(8 * GIB, 3 * GIB), Bound(9 * GIB, GIB)]


def test_within_a_container_the_root_of_the_mount_is_the_group(host: FakeHost) -> None:
    """Where the path of the group is the host's, and does not exist."""
    host.join("0::/system.slice/docker-1.scope")
    host.bound(".", str(8 * GIB), 6 * GIB)
    assert bounds(host) == [HOST, Bound(8 * GIB, 2 * GIB)]


def test_the_first_version_of_cgroups_bounds_as_well(host: FakeHost) -> None:
    """Its statistics have the sums over the groups below under names of their own."""
    host.join("4:memory:/a", "0::/")
    host.bound_v1("a", 4 * GIB, 3 * GIB, cached_bytes=GIB)
    assert bounds(host) == [HOST, Bound(4 * GIB, 2 * GIB)]


@pytest.mark.parametrize("limit", ["max", str(2**63 - 4096), str(100 * GIB)])
def test_what_limits_nothing_is_left_out(host: FakeHost, limit: str) -> None:
    """No limit, the number that stands for none, and all the memory there is."""
    host.join("0::/a")
    host.bound("a", limit, 6 * GIB)
    assert bounds(host) == [HOST]


def test_a_limit_that_is_set_later_is_seen(host: FakeHost) -> None:
    """An operator may limit a container while it runs."""
    host.join("0::/a")
    host.bound("a", "max", GIB)
    with memory_reader(host.root) as reader:
        reader.bounds()
        host.bound("a", str(4 * GIB), GIB)
        assert reader.bounds() == [HOST, Bound(4 * GIB, 3 * GIB)]


def test_a_machine_that_says_nothing_has_no_bounds(tmp_path: Path) -> None:
    """There is nothing to guard by."""
    with memory_reader(tmp_path) as reader:
        assert reader.bounds() == []


def test_the_pressure_is_that_of_the_last_two_seconds(host: FakeHost) -> None:
    """It rises with the time that tasks have waited, and falls when they wait no longer."""
    now = [100.0]
    host.press(7_000_000)
    with memory_reader(host.root, clock=lambda: now[0]) as reader:
        found = [reader.bounds()[0].pressure_ratio]
        for seconds, stalled in ((101.0, 7_000_000), (102.0, 8_000_000), (110.0, 8_000_000)):
            now[0] = seconds
            host.press(stalled)
            found.append(reader.bounds()[0].pressure_ratio)
    assert found == [0.0, 0.0, 0.5, 0.0]


def test_each_limit_has_its_own_pressure(host: FakeHost) -> None:
    """A container may be at its limit on a host that has memory, and the other way round."""
    now = [100.0]
    host.join("0::/a/b")
    for group in ("a", "a/b"):
        host.bound(group, str(4 * GIB), GIB)
    host.press(0)
    host.press(0, "sys/fs/cgroup/a/memory.pressure")
    with memory_reader(host.root, clock=lambda: now[0]) as reader:
        reader.bounds()
        now[0] = 102.0
        host.press(1_000_000)
        host.press(2_000_000, "sys/fs/cgroup/a/memory.pressure")
        assert [bound.pressure_ratio for bound in reader.bounds()] == [0.5, None, 1.0]


def test_this_kernel_is_understood() -> None:
    """Its own files have the form that is read."""
    with memory_reader() as reader:
        host, *_ = reader.bounds()
        assert host.pressure_ratio in {None, 0.0}
    assert host.total_bytes == psutil.virtual_memory().total
    assert 0 < host.available_bytes < host.total_bytes


def test_readings_take_no_more_and_more_memory(host: FakeHost) -> None:
    """A thousand of them keep nothing."""
    host.join("0::/a")
    host.bound("a", str(4 * GIB), GIB)
    host.press(0)
    looks_seconds = itertools.count(0.0, INTERVAL_SECONDS)
    with memory_reader(host.root, clock=lambda: next(looks_seconds)) as reader:
        reader.bounds()

        def read_often() -> None:
            for _ in range(1000):
                reader.bounds()

        kept, most = least_memory(read_often)
    assert kept < 4096
    assert most < 16 * 1024


LIMITED = """
import os, sys
from pathlib import Path
Path(sys.argv[1]).write_text(str(os.getpid()))
from holdfast.host_memory.reader import memory_reader
def show():
    print(*(n for bound in reader.bounds() for n in (bound.total_bytes, bound.available_bytes)))
with memory_reader() as reader:
    show()
    held = bytearray(b"x") * (64 << 20)
    show()
"""


def test_a_real_limit_is_read() -> None:
    """A process in a cgroup of 256 MiB sees the limit, and what it takes goes from what is left."""
    limit_bytes = 256 * MIB
    with memory_cgroup(limit_bytes) as group:
        done = subprocess.run(
            [sys.executable, "-c", LIMITED, str(group.members)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    readings = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    before, after = (dict(zip(row[::2], row[1::2], strict=True))[limit_bytes] for row in readings)
    assert 0 < before < limit_bytes
    assert before - after == pytest.approx(64 * MIB, abs=16 * MIB)
