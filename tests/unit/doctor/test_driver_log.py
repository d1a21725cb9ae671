"""What the GPU's driver has complained about."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.doctor.driver_log import DriverLog, check_driver_log, read_driver_log

LOADED = "6,339,5140900,-;NVRM: loading NVIDIA UNIX Open Kernel Module for aarch64  580.95.05\n"
OTHERS = "6,340,5140901,-;usb 1-1: error -110\n SUBSYSTEM=usb\n3,341,6,-;eth0: Xid not known\n"
COMPLAINTS = (
    "NVRM: Xid (PCI:000f:01:00): 31, pid=4242, name=VLLM::Worker, MMU Fault",
    "NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051)",
    "NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.",
    "NVRM: API mismatch: the client has the version 1, but this kernel module has 2.",
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with a driver, whose log has nothing about it yet."""
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: 580.95.05\n")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kmsg").write_text(OTHERS)
    return tmp_path


@pytest.mark.parametrize("complaint", COMPLAINTS)
def test_a_complaint_of_the_driver_is_found(root: Path, complaint: str) -> None:
    """It is quoted, without the kernel's numbers, and has a remedy."""
    with (root / "dev/kmsg").open("a") as log:
        log.write(f"{LOADED}3,400,123456789,-;{complaint}\n")
    log_of_driver = read_driver_log(root)
    assert log_of_driver == DriverLog(1, (complaint,))
    (finding,) = check_driver_log(log_of_driver)
    assert (finding.name, finding.severity) == ("driver-log", "warning")
    assert complaint in finding.seen
    assert finding.remedy


def test_many_complaints_are_counted_and_the_last_ones_quoted(root: Path) -> None:
    """The first are the least interesting."""
    with (root / "dev/kmsg").open("a") as log:
        log.writelines(f"3,{number},1,-;NVRM: Xid {number}\n" for number in range(1000))
    assert read_driver_log(root) == DriverLog(
        1000, ("NVRM: Xid 997", "NVRM: Xid 998", "NVRM: Xid 999")
    )


def test_a_driver_that_was_only_loaded_has_not_complained(root: Path) -> None:
    """Nor is an error of another driver one of the GPU's."""
    with (root / "dev/kmsg").open("a") as log:
        log.write(LOADED)
    (finding,) = check_driver_log(read_driver_log(root))
    assert finding.severity == "ok"


def test_a_log_that_cannot_be_read_is_said_to_be_so(root: Path) -> None:
    """As in most containers; nobody should take it for a good sign."""
    (root / "dev/kmsg").unlink()
    (finding,) = check_driver_log(read_driver_log(root))
    assert finding.severity == "warning"
    assert "cannot be read: No such file or directory" in finding.seen
    assert "dmesg" in finding.remedy


def test_a_machine_without_a_driver_has_no_finding(tmp_path: Path) -> None:
    """Nothing could complain there."""
    assert read_driver_log(tmp_path) is None
    assert list(check_driver_log(None)) == []


def test_a_log_without_an_end_is_not_read_without_end(root: Path) -> None:
    """A pipe that is kept open has no end, and nothing to read at the moment."""
    (root / "dev/kmsg").unlink()
    os.mkfifo(root / "dev/kmsg")
    writer = os.open(root / "dev/kmsg", os.O_RDWR)
    try:
        os.write(writer, f"3,1,1,-;{COMPLAINTS[0]}\n".encode())
        assert read_driver_log(root) == DriverLog(1, (COMPLAINTS[0],))
    finally:
        os.close(writer)
    (root / "dev/kmsg").unlink()
    (root / "dev/kmsg").symlink_to("/dev/zero")
    assert read_driver_log(root, deadline_seconds=0.1) == DriverLog()


def problem_of(device: Path) -> str:
    """Why a device that has no end cannot be read; empty if it can."""
    try:
        with device.open("rb", buffering=0) as log:
            os.set_blocking(log.fileno(), False)
            log.read(64 * 1024)
    except BrokenPipeError:  # the kernel has overwritten the record
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""


def test_the_log_of_this_kernel_can_be_read_or_is_said_not_to_be(root: Path) -> None:
    """The device gives one record at a time and has no end."""
    (root / "dev/kmsg").unlink()
    (root / "dev/kmsg").symlink_to("/dev/kmsg")
    log = read_driver_log(root)
    assert log is not None
    assert log.problem == problem_of(Path("/dev/kmsg"))
    assert len(log.last) == min(log.complaints, 3)
