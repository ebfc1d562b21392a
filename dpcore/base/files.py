"""Writes files whole or not at all, and never to a place that another user has chosen.

A regular file is written under another name in the same folder and renamed. That name is random
and must be new (``O_EXCL``, ``O_NOFOLLOW``), so no other user can have put a link there. A device,
a FIFO or a symbolic link at the path stays and is written to. In a world-writable directory those
of another user are refused, as Linux does for links with ``fs.protected_symlinks``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

_FLAGS = os.O_WRONLY | os.O_CLOEXEC


def write_whole(path: str | os.PathLike[str], content: str | bytes, mode: int = 0o666) -> None:
    """Replaces the file at ``path``. ``mode`` is that of a new file, less the umask; if the
    replaced file had stricter permissions, they are kept."""
    place = Path(path)
    data = content.encode() if isinstance(content, str) else content
    try:
        found = place.lstat()
    except FileNotFoundError:
        found = None
    if found is not None and not stat.S_ISREG(found.st_mode):
        _write_in_place(place, found, data, mode)
        return
    if found is not None:
        mode &= stat.S_IMODE(found.st_mode)
    draft = place.with_name(f".dpcore.{secrets.token_hex(8)}")  # short even if the name is long
    with _naming(place):
        descriptor = os.open(draft, _FLAGS | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        try:
            _write_all(descriptor, data)
            draft.replace(place)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise


def _write_in_place(place: Path, found: os.stat_result, data: bytes, mode: int) -> None:
    folder = place.parent.stat()
    is_public = folder.st_mode & stat.S_ISVTX and folder.st_mode & stat.S_IWOTH
    if is_public and found.st_uid not in (os.geteuid(), folder.st_uid):
        raise PermissionError(
            f"{place} is not a regular file and belongs to another user (uid {found.st_uid}), in a "
            "directory that all users may write to; choose another path"
        )
    is_link = stat.S_ISLNK(found.st_mode)
    how = os.O_CREAT | os.O_TRUNC if is_link else os.O_NOFOLLOW
    with _naming(place):
        _write_all(os.open(place, _FLAGS | how, mode), data)


@contextlib.contextmanager
def _naming(place: Path) -> Iterator[None]:
    """Errors name the file that was asked for. One of a full device names none."""
    try:
        yield
    except OSError as problem:
        raise OSError(problem.errno, problem.strerror, str(place)) from None


def _write_all(descriptor: int, data: bytes) -> None:
    with open(descriptor, "wb") as file:
        file.write(data)
