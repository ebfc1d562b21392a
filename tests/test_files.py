"""What dpcore writes for others to read: whole, and only where its user wants it."""

import errno
import json
import os
import stat
import threading
from types import SimpleNamespace

import pytest

import dpcore
from dpcore.base import files
from dpcore.base.files import write_whole
from dpcore.comm.communicators import costs
from dpcore.comm.launch import stores, torch_backend
from dpcore.recorder import file as trace_file
from dpcore.tools.show import read_run, write_page, write_picture
from tests.show.traces import write_trace


def trace_of(path):
    trace_file.write(path, [trace_file.RankRecord(0, 1, {}, 0, [])], 1, {})


def page_of(path):
    write_page(path, [read_run(write_trace(path.with_name("shown.json")))])


def picture_of(path):
    write_picture(path, [read_run(write_trace(path.with_name("shown.json")))])


def constants(path):
    costs.save({"memory": [1e-6, 1e-6, 1e-9]}, path)


def rendezvous_file(path):
    with stores.FileStore(str(path)).publish("key", "127.0.0.1:1"):
        assert path.read_text() == "key 127.0.0.1:1\n"
        path.with_name("seen").write_text("")
    assert not path.exists()
    path.write_text("removed in time")


WRITERS = {trace_of: "out.json", page_of: "out.html", picture_of: "out.png", constants: "out.json"}
ALL = {**WRITERS, rendezvous_file: "out"}


def names(cases):
    return [writer.__name__ for writer in cases]


def content_of_fifo(path, write):
    """What a reader gets out of the FIFO at ``path`` while ``write`` writes to it."""
    got = []
    reader = threading.Thread(target=lambda: got.append(path.read_bytes()))
    reader.start()
    write(path)
    reader.join(20)
    return got[0]


@pytest.mark.parametrize("writer", WRITERS, ids=names(WRITERS))
def test_a_fifo_or_device_is_written_to_and_stays(tmp_path, writer):
    path = tmp_path / WRITERS[writer]
    os.mkfifo(path)
    assert len(content_of_fifo(path, writer)) > 50
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_a_trace_into_a_fifo_is_the_trace(tmp_path):
    path = tmp_path / "run.json"
    os.mkfifo(path)

    def write(path):
        def body(comm):
            with dpcore.trace(path):
                comm.barrier()

        dpcore.spawn(body, 2, mode="threads")

    assert json.loads(content_of_fifo(path, write))["distributedInfo"]["world_size"] == 2


@pytest.mark.parametrize("writer", ALL, ids=names(ALL))
def test_nothing_that_is_planted_is_written_to(tmp_path, writer):
    """Links under the names that a draft could have, when these can be guessed."""
    path = tmp_path / ALL[writer]
    precious = tmp_path / "precious"
    precious.write_text("precious")
    for name in (f".{path.name}.{os.getpid()}", f"{path.name}.{os.getpid()}", "out.part"):
        (tmp_path / name).symlink_to(precious)
    before = set(tmp_path.iterdir())
    writer(path)
    assert precious.read_text() == "precious"
    assert path.is_file()
    new = {found.name for found in set(tmp_path.iterdir()) - before}
    assert new <= {path.name, "shown.json", "seen"}  # no draft is left


def test_a_link_stays_a_link(tmp_path):
    there, link = tmp_path / "there", tmp_path / "link"
    link.symlink_to(there)
    for text in ("longer than the next one", "new"):
        write_whole(link, text)
        assert link.is_symlink()
        assert there.read_text() == text


@pytest.mark.parametrize("kind", ("link", "fifo"))
def test_what_a_stranger_has_put_into_a_public_directory_is_refused(tmp_path, kind):
    path = tmp_path / "out"
    path.symlink_to(tmp_path / "precious") if kind == "link" else os.mkfifo(path)
    found = path.lstat()
    of_stranger = SimpleNamespace(st_mode=found.st_mode, st_uid=found.st_uid + 1)
    tmp_path.chmod(0o1777)
    with pytest.raises(PermissionError, match="belongs to another user"):
        files._write_in_place(path, of_stranger, b"text", 0o666)
    assert not (tmp_path / "precious").exists()


def test_who_may_read_it(tmp_path):
    before = os.umask(0o022)
    try:
        write_whole(tmp_path / "new", "")
        write_whole(tmp_path / "secret", "", mode=0o600)
        (tmp_path / "closed").touch(mode=0o600)
        write_whole(tmp_path / "closed", "")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"new": 0o644, "secret": 0o600, "closed": 0o600}


def test_a_file_that_cannot_be_written_stays_what_it_was(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    path.write_text("before")

    def fails(descriptor, data):
        os.write(descriptor, data[:3])
        os.close(descriptor)
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(files, "_write_all", fails)
    with pytest.raises(OSError, match="no space"):
        write_whole(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_rendezvous_file_replaces_nothing_but_a_file(tmp_path):
    path = tmp_path / "rendezvous"
    os.mkfifo(path)
    store = stores.FileStore(str(path))
    with pytest.raises(dpcore.RendezvousError, match="not a regular file"), store.publish("a", "b"):
        pass
    with pytest.raises(dpcore.RendezvousError, match="before the deadline"):
        store.read("a", deadline=0.0)  # and does not wait for somebody who writes
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_a_flight_record_is_its_users_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    (tmp_path / "record0").touch(mode=0o644)
    path = torch_backend.write_flight_record(str(tmp_path / "record"))
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
