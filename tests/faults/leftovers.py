"""What a job could leave behind: on its host and in its process."""

import os
import threading
from pathlib import Path

from dpcore.comm.launch.identity import find_identity


def of_this_host(*init_methods):
    """dpcore's names in shared memory, and sockets of these rendezvous. Semaphores and tensors that
    Python and torch share bear no job's name: they may be those of a test beside this one."""
    jobs = [find_identity(0, 2, method).job for method in init_methods]
    sockets = Path("/proc/net/unix").read_text().splitlines()
    return {
        "shared memory": sorted(
            name
            for name in os.listdir("/dev/shm")
            if name.startswith("dpcore") and not name.startswith("dpcore-bench")  # of a benchmark
        ),
        "sockets": sorted(line for line in sockets if any(job in line for job in jobs)),
    }


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def of_this_process():
    """Descriptors, threads, mappings, and KiB in memory."""
    status = Path("/proc/self/status").read_text()
    return {
        "descriptors": descriptors(),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "mappings": Path("/proc/self/maps").read_text().count("\n"),
        "resident": int(status.split("VmRSS:")[1].split()[0]),
    }


def growth(before, after):
    """What grew beyond noise: the allocator may map a little and keep some memory."""
    allowed = {"mappings": 4, "resident": 3000}
    return {
        key: (before[key], after[key])
        for key in before
        if after[key] > before[key] + allowed.get(key, 0)
    }
