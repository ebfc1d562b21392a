"""What ``dpcore doctor`` says of the machine's links: between processors, to cards, between GPUs.

All of it is read from the kernel's files, except the links between GPUs, which ``nvidia-smi``
knows.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

from dpcore.tools.diagnose.finding import Finding

_SYS = Path("/sys")
_NVIDIA, _DISPLAY = "0x10de", "0x03"
_PATIENCE = 3.0  # seconds for nvidia-smi

# What nvidia-smi writes between two GPUs, from near to far.
_WAYS = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the processor",
    "NODE": "the processors of a NUMA node",
    "SYS": "the link between processors",
}


def links() -> Finding:
    """How bytes get from one place of this machine to another."""
    nodes, cards, gpus = _numa_nodes(), _network_cards(), _gpus()
    ways = between_gpus(_topology()) if len(gpus) > 1 else {}
    said = [", ".join(nodes), *cards, *(text for text, _ in gpus), *map(_way_text, ways.items())]
    details = {"numa": nodes, "cards": cards, "gpus": [text for text, _ in gpus], "ways": ways}
    narrow = [text for text, is_narrow in gpus if is_narrow]
    if narrow:
        return Finding(
            "links", "missing", "; ".join(said),
            "a GPU has fewer PCIe lanes than it could: lspci -vv shows LnkCap and LnkSta; another "
            "slot, or the machine's firmware, may give the rest",
            details,
        )  # fmt: skip
    return Finding("links", "ok", "; ".join(said), details=details)


def _numa_nodes() -> list[str]:
    """Processors of each; a machine whose kernel knows of none has one."""
    folders = (_SYS / "devices/system/node").glob("node[0-9]*")
    nodes = sorted(folders, key=lambda folder: int(folder.name[4:]))
    return [
        f"NUMA node {node.name[4:]} with processors {text_of(node / 'cpulist')}" for node in nodes
    ] or ["one NUMA node"]


def _network_cards() -> list[str]:
    """Those that are a device, with the rate that was agreed with the other end of the cable."""
    found = []
    for card in sorted((_SYS / "class/net").glob("*")):
        if not (card / "device").exists():
            continue
        mbit = text_of(card / "speed")
        is_known = mbit.isdigit() and int(mbit) > 0
        rate = f"{int(mbit) / 1000:g} Gbit/s" if is_known else "(rate unknown)"
        found.append(f"{card.name} {rate}{_at_node(card / 'device')}")
    return found


def _gpus() -> list[tuple[str, bool]]:
    """Each NVIDIA GPU's PCIe link, and whether it has fewer lanes than the GPU. An idle one
    also lowers its rate, which says nothing."""
    found = []
    for device in sorted((_SYS / "bus/pci/devices").glob("*")):
        vendor, kind = (text_of(device / name) for name in ("vendor", "class"))
        if vendor != _NVIDIA or not kind.startswith(_DISPLAY):
            continue
        lanes, most = (text_of(device / f"{which}_link_width") for which in ("current", "max"))
        rate = text_of(device / "max_link_speed").removesuffix(" PCIe")
        is_narrow = lanes.isdigit() and most.isdigit() and int(lanes) < int(most)
        width = f"x{lanes} of x{most}" if is_narrow else f"x{lanes}"
        found.append((f"GPU {device.name} PCIe {rate} {width}{_at_node(device)}", is_narrow))
    return found


def _at_node(device: Path) -> str:
    """Where a device is attached. Virtual ones say -1."""
    node = text_of(device / "numa_node")
    return f" at NUMA node {node}" if node.isdigit() else ""


def _topology() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    done = subprocess.run(
        ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=_PATIENCE
    )
    return done.stdout


def between_gpus(matrix: str) -> dict[str, int]:
    """How many pairs of GPUs are connected by what, from the matrix of ``nvidia-smi topo -m``.

    >>> between_gpus("GPU0 GPU1 CPU\\nGPU0  X  NV18  0-31\\nGPU1 NV18  X  0-31")
    {'NV18': 1}
    """
    plain = re.sub(r"\x1b\[[\d;]*m", "", matrix)
    rows = [line.split() for line in plain.splitlines() if re.match(r"\s*GPU\d+\s", line)]
    rows = [row[1:] for row in rows if "X" in row]
    pairs = Counter(
        row[column] for number, row in enumerate(rows) for column in range(number) if row
    )
    return dict(pairs)


def _way_text(pair: tuple[str, int]) -> str:
    way, count = pair
    kind = way.rstrip("0123456789")
    lanes = f" of {way[len(kind) :]} links" if way != kind else ""
    pairs = "1 pair" if count == 1 else f"{count} pairs"
    return f"{pairs} of GPUs by {_WAYS.get(kind, way)}{lanes}"


def text_of(path: Path) -> str:
    """The content of one of the kernel's files; empty where there is none, or it says nothing."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
