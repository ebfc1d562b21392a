"""``on_devices``: ranks that are threads, each with a communicator over a device of the host."""

import threading

import dpcore
from dpcore import _C
from dpcore.comm.communicators.device import DeviceCommunicator


def start(backend, control, settings, uuid):
    """ "nccl": over the stand-in, which has to be loaded (fixture ``fake``)."""
    return _C.start_on_device(control._native, "host", *settings, [], backend, uuid)


def on_devices(
    body,
    world,
    *args,
    backend="nccl",
    algorithm="auto",
    deterministic=False,
    timeout=30.0,
    uuids=None,
):
    """Calls ``body(comm, *args)`` on every rank; the results in rank order. No rank begins before
    all have started: one that fails at once would otherwise fail the start of the others."""
    started = threading.Barrier(world)

    def rank_main(control):
        uuid = f"gpu {control.rank}" if uuids is None else uuids[control.rank]
        try:
            native = start(backend, control, (timeout, algorithm, deterministic), uuid)
        except BaseException:
            started.abort()
            raise
        comm = DeviceCommunicator(native, "inproc")
        try:
            started.wait(timeout)
            result = body(comm, *args)
        except BaseException as error:
            if not comm.closed:
                comm.abort(f"{type(error).__name__}: {error}")
            raise
        finally:
            comm.close()
        return result

    return dpcore.spawn(rank_main, world, mode="threads", timeout=30.0)


def errors_of(body, world, **options):
    """What each rank raises, or what it returns."""

    def guarded(comm):
        try:
            return body(comm)
        except dpcore.Error as error:
            return error

    return on_devices(guarded, world, **options)


def calls(fake, rank=0):
    """What a rank has called of the library, in order."""
    lines = fake.fake_nccl_log().decode().splitlines()
    return [line.split(" ", 1)[1] for line in lines if line.startswith(f"{rank} ")]
