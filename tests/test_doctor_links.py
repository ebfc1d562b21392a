"""dpcore doctor, the machine's links: on this machine, and on machines that are made of files."""

import pytest

from dpcore.tools.diagnose import doctor_links

MATRIX = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tPIX\t0-31\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\tNODE\t0-31\t0\t\tN/A\n"
    "GPU2\tSYS\tSYS\t X \tSYS\t32-63\t1\t\tN/A\n"
    "NIC0\tPIX\tNODE\tSYS\t X\n\n"
    "Legend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe and the SMP interconnect\n"
)


def write(folder, **files):
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Two sockets, a fast card, one that tells nothing, a bridge, and two GPUs."""
    for node, processors in enumerate(("0-31", "32-63")):
        write(tmp_path / f"devices/system/node/node{node}", cpulist=processors)
    write(tmp_path / "class/net/ib0", speed=400000)
    write(tmp_path / "class/net/ib0/device", numa_node=1)
    write(tmp_path / "class/net/eth0", speed=-1)
    write(tmp_path / "class/net/eth0/device", numa_node=-1)
    write(tmp_path / "class/net/bridge", speed=10000)
    gpu = {
        "vendor": "0x10de", "class": "0x030200", "current_link_width": 16, "max_link_width": 16,
        "max_link_speed": "32.0 GT/s PCIe", "numa_node": 0,
    }  # fmt: skip
    for place in ("0000:1b:00.0", "0000:9a:00.0"):
        write(tmp_path / f"bus/pci/devices/{place}", **gpu)
    sound = {"vendor": "0x10de", "class": "0x040300"}
    write(tmp_path / "bus/pci/devices/0000:1b:00.1", **sound)
    monkeypatch.setattr(doctor_links, "_SYS", tmp_path)
    monkeypatch.setattr(doctor_links, "_topology", lambda: MATRIX)
    return tmp_path


def test_a_machine_with_gpus(machine):
    finding = doctor_links.links()
    assert finding.state == "ok"
    assert finding.text.split("; ") == [
        "NUMA node 0 with processors 0-31, NUMA node 1 with processors 32-63",
        "eth0 (rate unknown)",
        "ib0 400 Gbit/s at NUMA node 1",
        "GPU 0000:1b:00.0 PCIe 32.0 GT/s x16 at NUMA node 0",
        "GPU 0000:9a:00.0 PCIe 32.0 GT/s x16 at NUMA node 0",
        "1 pair of GPUs by NVLink of 18 links",
        "2 pairs of GPUs by the link between processors",
    ]
    assert finding.details["ways"] == {"NV18": 1, "SYS": 2}


def test_a_gpu_with_too_few_lanes_is_told(machine):
    (machine / "bus/pci/devices/0000:9a:00.0/current_link_width").write_text("4\n")
    finding = doctor_links.links()
    assert finding.state == "missing"
    assert "GPU 0000:9a:00.0 PCIe 32.0 GT/s x4 of x16 at NUMA node 0" in finding.text
    assert "lspci -vv" in finding.advice


def test_a_kernel_that_tells_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor_links, "_SYS", tmp_path)
    finding = doctor_links.links()
    assert (finding.state, finding.text) == ("ok", "one NUMA node")


def test_this_machine():
    finding = doctor_links.links()
    assert finding.text.startswith(("NUMA node 0 with processors 0", "one NUMA node"))
    assert doctor_links.between_gpus("no such program") == {}
