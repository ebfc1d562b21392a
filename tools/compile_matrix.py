"""Compiles every torch-facing unit against the headers of several torch versions.

    python tools/compile_matrix.py                        # 2.11 to 2.15
    python tools/compile_matrix.py --torch 2.12 --jobs 4 --verbose

Headers change between torch versions, and only one of them is installed here. This asks pip where
the wheel of each version is, takes the headers out of it (a torch wheel is hundreds of megabytes,
of which the headers are a few percent, so only those are fetched where the server allows reading a
part of a file), and checks the syntax of each unit of the build (tools/build_units.py) against
them. Nothing is linked or run.

The headers are kept in build/torch-headers/<version>.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import sysconfig
import time
import urllib.request
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tools"))  # tests import this file from the root

from build_units import units_of, write_units  # noqa: E402

CACHE = ROOT / "build" / "torch-headers"
VERSIONS = ["2.11", "2.12", "2.13", "2.14", "2.15"]
# What the module is compiled with, as far as it decides about syntax (setup.py).
FLAGS = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-w", "-fsyntax-only"]
DEFINES = ["-DTORCH_API_INCLUDE_EXTENSION_H", "-DTORCH_EXTENSION_NAME=_C"]
PART = 4 << 20  # bytes per request: the directory of a wheel with its headers is read in a dozen


class RemoteFile(io.RawIOBase):
    """A file behind a URL, read in parts: seekable, which is all that zipfile asks for."""

    def __init__(self, url: str) -> None:
        self.url = url
        with self.request(0, 0) as answer:
            if answer.status != 206:
                raise io.UnsupportedOperation("the server does not give parts of a file")
            self.size = int(answer.headers["Content-Range"].rpartition("/")[2])
        self.position = 0
        self.fetched = 0
        self.parts: dict[int, bytes] = {}

    def request(self, begin: int, end: int) -> Any:
        headers = {"Range": f"bytes={begin}-{end}", "Accept-Encoding": "identity"}
        request = urllib.request.Request(self.url, headers=headers)
        return urllib.request.urlopen(request, timeout=120)

    def part(self, index: int) -> bytes:
        if index not in self.parts:
            begin = index * PART
            with self.request(begin, min(begin + PART, self.size) - 1) as answer:
                data = answer.read()
            self.fetched += len(data)
            if len(self.parts) > 8:  # the oldest is not asked for again: reading goes forward
                del self.parts[next(iter(self.parts))]
            self.parts[index] = data
        return self.parts[index]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        self.position = base + offset
        return self.position

    def readinto(self, buffer: Any) -> int:
        if self.position >= self.size:
            return 0
        index, offset = divmod(self.position, PART)
        data = self.part(index)[offset : offset + len(buffer)]
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


def wheel_of(version: str) -> tuple[str, str]:
    """The full version and the URL of the wheel that pip would install."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    command += ["--no-deps", "--only-binary=:all:", "-qq", "--report", "-", f"torch=={version}.*"]
    out = subprocess.run(command, capture_output=True, text=True)
    if out.returncode != 0:
        raise SystemExit(f"pip finds no torch {version} for this Python:\n{out.stderr}")
    (item,) = json.loads(out.stdout)["install"]
    return item["metadata"]["version"], item["download_info"]["url"]


def open_wheel(url: str) -> tuple[Any, RemoteFile | None]:
    try:
        if url.startswith("http"):
            remote = RemoteFile(url)
            return io.BufferedReader(remote, buffer_size=1 << 16), remote
    except io.UnsupportedOperation:
        pass
    if url.startswith("file:"):
        return open(urllib.request.url2pathname(url.removeprefix("file://")), "rb"), None
    with urllib.request.urlopen(url) as answer:
        return io.BytesIO(answer.read()), None


def headers_of(version: str) -> Path:
    """build/torch-headers/<version>/torch/include, fetched when it is not there yet."""
    target = CACHE / version
    if not (target / "complete").exists():
        begin = time.monotonic()
        full, url = wheel_of(version)
        stream, remote = open_wheel(url)
        with zipfile.ZipFile(stream) as wheel:
            names = [name for name in wheel.namelist() if name.startswith("torch/include/")]
            # In the order in which they lie in the file, or every part would be fetched twice.
            names.sort(key=lambda name: wheel.getinfo(name).header_offset)
            for name in names:
                wheel.extract(name, target)
        fetched = f", {remote.fetched >> 20} of {remote.size >> 20} MiB fetched" if remote else ""
        seconds = time.monotonic() - begin
        print(f"torch {full}: {len(names)} headers{fetched}, {seconds:.0f} s", flush=True)
        (target / "complete").write_text(full + "\n")
    return target / "torch" / "include"


def torch_facing_units() -> list[Path]:
    """What knows torch, and the bindings: pybind11's headers come from torch for all of them."""
    folders = ("bindings/", "reducer/", "tensors/", "torch_backend/")
    units = {
        unit: sources
        for unit, sources in units_of(ROOT / "csrc").items()
        if any(source.startswith(folders) for source in sources)
    }
    write_units(units, ROOT / "build" / "units")
    return [ROOT / "build" / "units" / f"{unit}.cpp" for unit in units]


def check(version: str, source: Path, include: Path) -> tuple[str, Path, float, str]:
    command = [os.environ.get("CXX", "g++"), *FLAGS, *DEFINES, "-I", str(ROOT / "csrc")]
    for system in (include, include / "torch/csrc/api/include", sysconfig.get_path("include")):
        command += ["-isystem", str(system)]
    begin = time.monotonic()
    out = subprocess.run([*command, str(source)], capture_output=True, text=True)
    seconds = time.monotonic() - begin
    return version, source, seconds, "" if out.returncode == 0 else out.stderr


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--torch", nargs="+", default=VERSIONS, metavar="2.X", help="versions")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--verbose", action="store_true", help="whole error messages")
    arguments = parser.parse_args()
    for version in arguments.torch:
        if not re.fullmatch(r"\d+\.\d+", version):
            parser.error(f"{version}: write major.minor, as in 2.12")

    includes = {version: headers_of(version) for version in arguments.torch}
    sources = torch_facing_units()
    failed = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        cells = [(version, source) for version in includes for source in sources]
        results = pool.map(lambda cell: check(cell[0], cell[1], includes[cell[0]]), cells)
        for version, source, seconds, errors in results:
            verdict = "FAILED" if errors else "ok"
            name = source.stem
            print(f"torch {version}  {name:20} {verdict:7} {seconds:5.1f} s", flush=True)
            if errors:
                failed += 1
                lines = [
                    line for line in errors.splitlines() if arguments.verbose or "error:" in line
                ]
                print("\n".join(lines if arguments.verbose else lines[:10]))
    print(f"{len(cells)} checks, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
