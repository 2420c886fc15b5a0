"""CPU time and memory of other processes, as the kernel counts them."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the user and system time of processes, all threads, ended ones included.

    The resolution is nanoseconds where ``/proc/<pid>/stat`` has ticks of 10 ms, too coarse for
    what nginx needs for a thousand requests. The clock's number is that of
    ``clock_getcpuclockid(3)``.

    Raises:
        OSError: a process has ended.
    """
    return sum(time.clock_gettime_ns((~pid << 3) | 2) for pid in pids) / 1e9


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the memory of processes that is in RAM, shared pages included."""
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES for pid in pids)


def waited_seconds() -> float:
    """Return how long this process was ready to run and no core was free, since its start."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
