"""Keys that change in a file while requests come."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.api.key_lines import NO_LIMITS, KeyLimits
from holdfast.api.keyring import LOOK_SECONDS, MAX_FILE_BYTES, Keyring
from holdfast.errors import UsageError


class Clock:
    """A time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_seconds = 0.0

    def __call__(self) -> float:
        """What `time.monotonic` would say."""
        return self.now_seconds

    def pass_a_look(self) -> None:
        """Let it be time to look at the file."""
        self.now_seconds += LOOK_SECONDS


class WallClock:
    """A clock at which the file was written long ago, unless `is_writing` is set."""

    is_writing = False

    def __call__(self) -> float:
        """What `time.time` would say."""
        return 0.0 if self.is_writing else 2.0**40


def _right(ring: Keyring, *keys: str) -> list[bool]:
    return [ring.name_of(key.encode()) is not None for key in keys]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with two keys."""
    path = tmp_path / "keys"
    path.write_text("one\ntwo\n")
    return path


def test_a_key_has_a_name_that_does_not_tell_it() -> None:
    """The first digits of its digest: the same at each start, another for each key."""
    ring = Keyring(["one", "two"])
    assert ring.name_of(b"one") == "key-7692c3ad"
    assert ring.name_of(b"two") not in {None, "key-7692c3ad"}


@pytest.mark.parametrize("given", [b"", b"on", b"one ", b"onetwo", b"one\ntwo", b"\xff\0"])
def test_another_word_is_no_key(given: bytes) -> None:
    """Not a part of one, not two, and not nothing."""
    assert Keyring(["one", "two"]).name_of(given) is None
    assert Keyring().name_of(given) is None


def test_keys_of_a_file_are_right_beside_those_given(path: Path) -> None:
    """A file adds, whatever was given."""
    path.write_bytes(b"# the old one\r\none\r\n\r\n   \n  two \n#three\n")
    ring = Keyring(["given"], path)
    assert _right(ring, "given", "one", "two", "three", "#three", "") == [True] * 3 + [False] * 3


def test_a_changed_file_is_read_again(path: Path) -> None:
    """The new key is right and the old one is not, as soon as it is time to look."""
    clock = Clock()
    ring = Keyring(["given"], path, clock=clock, wall_clock=WallClock())
    path.write_text("two\nthree\n")
    assert _right(ring, "one", "three") == [True, False]
    clock.pass_a_look()
    assert _right(ring, "given", "one", "two", "three") == [True, False, True, True]


def test_a_link_that_is_swapped_is_a_change(path: Path) -> None:
    """Kubernetes changes a mounted Secret so: same size, same time, another file."""
    other, link, clock = path.with_name("other"), path.with_name("link"), Clock()
    other.write_text("six\nten\n")
    for file in (path, other):
        os.utime(file, ns=(7, 7))
    link.symlink_to(path)
    ring = Keyring([], link, clock=clock, wall_clock=WallClock())
    swapped = path.with_name("swapped")
    swapped.symlink_to(other)
    swapped.replace(link)
    clock.pass_a_look()
    assert _right(ring, "one", "six") == [False, True]


@pytest.mark.parametrize("content", [None, "", "\n# none\n", "one\ntwo words\n", "\0\n", "ключ\n"])
def test_a_file_that_breaks_leaves_the_keys_that_were_read_last(
    path: Path, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says so once, until it is whole again, and quotes nothing of it."""
    clock = Clock()
    ring = Keyring([], path, clock=clock, wall_clock=WallClock())
    whole = path.with_name("whole")
    path.rename(whole)
    if content is not None:
        path.write_text(content)
    for _ in range(3):
        clock.pass_a_look()
        assert _right(ring, "one", "two") == [True, True]
    (error,) = (record for record in caplog.records if record.levelname == "ERROR")
    assert str(path) in error.getMessage()
    assert "words" not in error.getMessage()
    whole.write_text("three\n")
    whole.replace(path)
    clock.pass_a_look()
    assert _right(ring, "one", "three") == [False, True]
    path.unlink()
    clock.pass_a_look()
    assert _right(ring, "three") == [True]
    assert [record.levelname for record in caplog.records].count("ERROR") == 2


def test_each_mistake_in_a_file_is_logged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second one shows only after the first is corrected."""
    clock = Clock()
    ring = Keyring([], path, clock=clock, wall_clock=WallClock())
    for content in ("one\ntwo words\n", "one\n# two\nthree words\n", "one\n# 2\nthree words\n"):
        path.write_text(content)
        clock.pass_a_look()
        assert ring.is_broken
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert [("line 2" in text, "line 3" in text) for text in errors] == [
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize(
    ("content", "reason", "remedy"),
    [
        (b"", "it contains no key", "add a key"),
        (b"# none\n\n", "it contains no key", "add a key"),
        (b"one\nhush hush\n", "line 2: expected a key", "correct that line."),
        (b"hush\xff\n", "line 1: expected a key", "correct that line."),
        (b"\xef\xbb\xbfhush\n", "line 1: expected a key", "correct that line."),
        (b"hush max_tokens_per_day=2M\n", "2M is written 2000000", "correct that line."),
        (b"x" * (MAX_FILE_BYTES + 1), "too large", "name a readable file"),
    ],
)
def test_a_start_with_a_wrong_file_is_refused(
    path: Path, content: bytes, reason: str, remedy: str
) -> None:
    """The error names flag, file and line, and no key; the remedy fits what is wrong."""
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        Keyring(["given"], path, source="--admin-api-key-file")
    assert caught.value.cause.startswith(f"--admin-api-key-file: {path}: ")
    assert reason in caught.value.cause
    assert caught.value.remedy.startswith(remedy)
    assert "hush" not in caught.value.line


def test_a_start_without_a_regular_file_is_refused(tmp_path: Path) -> None:
    """Missing, a directory, a pipe that nobody writes to, a device without an end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, reason in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "not a regular file"),
        (pipe, "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
    ):
        with pytest.raises(UsageError, match=reason):
            Keyring([], path)


def test_a_file_that_is_being_written_is_not_taken_over(path: Path) -> None:
    """Caught half, a part of a key would be a key, and the others would be none."""
    clock, wall_clock = Clock(), WallClock()
    ring = Keyring([], path, clock=clock, wall_clock=wall_clock)
    wall_clock.is_writing = True
    path.write_text("one\nt")
    clock.pass_a_look()
    assert _right(ring, "one", "two", "t") == [True, True, False]
    path.write_text("one\nthree\n")
    clock.pass_a_look()
    assert _right(ring, "one", "two", "three") == [True, True, False]
    clock.pass_a_look()
    assert _right(ring, "one", "two", "three") == [True, False, True]


def test_a_broken_file_is_noticed_without_a_request(path: Path) -> None:
    """Also where no request comes with a key, until the file is whole again."""
    clock = Clock()
    ring = Keyring([], path, clock=clock, wall_clock=WallClock())
    seen = [ring.is_broken]
    whole = path.with_name("whole")
    for source, target in ((path, whole), (whole, path)):
        source.rename(target)
        clock.pass_a_look()
        seen.append(ring.is_broken)
    assert seen == [False, True, False]


def test_a_key_that_can_be_guessed_is_named(path: Path) -> None:
    """Given or in a file, by the name that tells nothing of it."""
    path.write_text("b\n" + "c" * 16 + "\n")
    ring = Keyring(["a", "d" * 16], path)
    assert set(ring.short_names) == {ring.name_of(b"a"), ring.name_of(b"b")}


def test_a_key_has_the_name_of_the_file(path: Path) -> None:
    """Also one that was given with a flag; a client with two keys is one."""
    path.write_text("alice: one\nalice: two\ngiven: three\nfour\n")
    ring = Keyring(["three", "five"], path)
    names = [ring.name_of(key) for key in (b"one", b"two", b"three", b"four", b"five")]
    assert names[:3] == ["alice", "alice", "given"]
    assert all(name is not None and name.startswith("key-") for name in names[3:])
    assert ring.count == 4
    assert set(ring.names) == set(names)


def test_limits_change_with_the_file(path: Path) -> None:
    """They are those of the name, whichever key was sent."""
    clock = Clock()
    path.write_text("alice: one max_tokens_per_day=5\ntwo\n")
    ring = Keyring([], path, clock=clock, wall_clock=WallClock())
    assert ring.limits_of("alice") == KeyLimits(max_tokens_per_day=5)
    path.write_text("alice: one max_requests_per_minute=6\ntwo\n")
    clock.pass_a_look()
    assert _right(ring, "one") == [True]
    assert ring.limits_of("alice") == KeyLimits(max_requests_per_minute=6)
    assert ring.limits_of("bob") == NO_LIMITS


def test_a_file_of_admins_has_names_but_no_limits(path: Path) -> None:
    """A limit that is not kept would be worse than none."""
    path.write_text("alice: one\n")
    assert Keyring([], path, may_limit=False).name_of(b"one") == "alice"
    path.write_text("one\nalice: two max_tokens_per_day=5\n")
    with pytest.raises(UsageError, match="line 2: remove its limits"):
        Keyring([], path, may_limit=False)


def test_a_space_that_may_be_missing_is_pointed_out(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The key stays the whole word, which the log does not repeat."""
    path.write_text("two\nalice:one\n")
    assert _right(Keyring([], path), "alice:one", "one") == [True, False]
    (record,) = caplog.records
    assert "line 2" in record.getMessage()
    assert "alice" not in record.getMessage()
