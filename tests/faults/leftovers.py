"""What a job could leave behind on its host."""

import os
from pathlib import Path
from tempfile import gettempdir


def of_this_host():
    """Files in shared and temporary memory, our sockets, and descriptors of this process."""
    temporary = Path(gettempdir())
    sockets = [
        line.split()[-1]
        for line in Path("/proc/net/unix").read_text().splitlines()
        if "dpcore" in line
    ]
    return {
        "shared memory": sorted(os.listdir("/dev/shm")),
        "temporary files": sorted(
            entry.name for entry in temporary.iterdir() if "dpcore" in entry.name
        ),
        "sockets": sorted(sockets),
    }


def descriptors():
    return len(os.listdir("/proc/self/fd"))
