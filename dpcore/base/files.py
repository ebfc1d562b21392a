"""Writes files for others to read: never half of one, and nowhere that a stranger has chosen.

A regular file is written under another name beside its place and renamed into it. That name is
random and has to be new (``O_EXCL``, ``O_NOFOLLOW``), so nobody can have put a link there. Whatever
else is at the path (a device, a FIFO, a symbolic link) stays what it is and is written to. In a
directory that everybody may write to, those that another user has made are refused, as Linux does
for links with ``fs.protected_symlinks``.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

_FLAGS = os.O_WRONLY | os.O_CLOEXEC


def write_whole(path: str | os.PathLike[str], content: str | bytes, mode: int = 0o666) -> None:
    """Replaces what is at ``path``. ``mode`` is that of a new file, less the umask; a file that is
    replaced hands down its own, where that lets in fewer."""
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
    draft = place.with_name(f".dpcore.{secrets.token_hex(8)}")  # however long the own name is
    try:
        descriptor = os.open(draft, _FLAGS | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        try:
            _write_all(descriptor, data)
            draft.replace(place)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
    except OSError as problem:
        if problem.filename != str(draft):
            raise
        raise OSError(problem.errno, problem.strerror, str(place)) from None  # the name asked for


def _write_in_place(place: Path, found: os.stat_result, data: bytes, mode: int) -> None:
    folder = place.parent.stat()
    is_public = folder.st_mode & stat.S_ISVTX and folder.st_mode & stat.S_IWOTH
    if is_public and found.st_uid not in (os.geteuid(), folder.st_uid):
        raise PermissionError(
            f"{place} is not a regular file and belongs to another user (uid {found.st_uid}), in a "
            "directory that everybody may write to; choose another path"
        )
    is_link = stat.S_ISLNK(found.st_mode)
    how = os.O_CREAT | os.O_TRUNC if is_link else os.O_NOFOLLOW
    _write_all(os.open(place, _FLAGS | how, mode), data)


def _write_all(descriptor: int, data: bytes) -> None:
    with open(descriptor, "wb") as file:
        file.write(data)
