"""How long do the processes of an engine spin when nothing comes any more?

A reader of vLLM's shared memory calls `sched_yield` for a second after each message, before it
sleeps until it is notified: in EngineCore and in each worker, a second of a core for every pause of
the load (`SpinCondition.busy_loop_s`, 0.32; vllm-project/vllm#52814, vllm-project/vllm#52916). On
small machines that core is wanted elsewhere, or heats the chip that it shares with the GPU.

Under load the next message comes sooner than that, and a reader that sleeps then was measured to
cost a fifth of the output of one client, so that only the pauses become cheaper.
"""

from __future__ import annotations

SPIN_SECONDS = 0.5
"""Far above an engine step, and what is asked at once after READY finds them awake. Far above the
millisecond, too, within which libzmq may drop a notification that follows another.
"""


def spin_less() -> None:
    """Have the readers that are made in this process from now on sleep after `SPIN_SECONDS`."""
    from vllm.distributed.device_communicators import shm_broadcast  # noqa: PLC0415 - vLLM is large

    shm_broadcast.SpinCondition.__init__.__defaults__ = (SPIN_SECONDS,)
