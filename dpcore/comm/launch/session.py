"""``init`` and ``finalize``: the communicator that a program works with when it names none."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dpcore.base import plugged_in
from dpcore.base.link import check_no_link, link_or_variable, speeds
from dpcore.base.switch import is_on
from dpcore.base.user_code import is_own
from dpcore.comm.communicators import costs
from dpcore.comm.communicators.checks import check_is
from dpcore.comm.launch import placement
from dpcore.comm.launch.identity import Identity, InstanceCounter, find_identity, may_span_hosts
from dpcore.comm.launch.rendezvous import advised, tcp_options
from dpcore.comm.launch.threads import (
    choose_kernels,
    share_processors,
    sharers_among,
    usable_processors,
)
from dpcore.errors import Error, Unsupported, on_its_way

if TYPE_CHECKING:
    from dpcore import _C
    from dpcore.comm.communicators.native import Communicator

_BACKENDS = ("native", "mpi", "torch", "nccl", "cupy", "cuda")
_TRANSPORTS = ("auto", "shm", "tcp", "shm+tcp", "inproc")

_instances = InstanceCounter()
_all: weakref.WeakSet[Communicator] = weakref.WeakSet()
_of_process: Communicator | None = None
_of_thread = threading.local()  # for ranks that are threads
_before_finalize: list[Callable[[Communicator], None]] = []


def init(
    backend: str = "native",
    *,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
    transport: str = "auto",
    timeout: float = 30.0,
    link: str | None = None,
    algorithm: Any = "auto",
    deterministic: bool = False,
    device: Any = None,
    join: bool | None = None,
) -> Communicator:
    """Meets the other ranks and returns the communicator of all of them. Torch gets this rank's
    share of the processors, unless OMP_NUM_THREADS says how many threads it has.

    ``backend``   "native": tensors on the CPU, dpcore's own core. "torch" uses the default group of
                  torch.distributed as it is, and leaves the arguments below aside; the result
                  then is a ``dpcore.TorchCommunicator``, with the same methods.
                  "mpi": tensors on the CPU, by an MPI library through mpi4py; the ranks are
                  those of MPI (``mpiexec -n 2 python train.py``), and of the arguments below it
                  takes ``timeout``. See docs/mpi.md.
                  "nccl": tensors on GPUs, see docs/gpu.md. "cupy": the same
                  through CuPy. "cuda": without NCCL, on one host, also several ranks on one GPU.
    ``rank``, ``world_size``   default to what torchrun, mpirun or a plain environment says
                  (RANK, WORLD_SIZE, ...), and without any to a world of one.
    ``init_method``  ``"tcp://host:port"`` (of rank 0), ``"file:///path"`` (which all hosts see),
                  or, for ranks of one host, any text that is the same on all of them and on no
                  other job; defaults to what the launcher left, MASTER_ADDR and MASTER_PORT first.
    ``transport``  "shm": ranks are processes of this host, over mapped memory; no port is opened.
                  "tcp": over the network, also within a host. "shm+tcp": ranks find out which of
                  them share a host; mapped memory within a host, TCP between hosts. "auto": "shm"
                  when the launcher says that all ranks are on this host, or they meet at a
                  loopback address, otherwise "shm+tcp". "inproc": ranks are threads of this
                  process.
    ``timeout``   seconds after which a wait for another rank (also here) raises; ``float("inf")``
                  waits for ever.
    ``link``      be as slow as a network: "10gbit,50us" (bandwidth, latency), see
                  ``dpcore.base.link``. Any transport; all data then travels as messages. None
                  is what DPCORE_LINK says.
    ``algorithm``  the default of all collectives, see ``dpcore.algorithms_of("all_reduce")``.
                  "auto" is what DPCORE_ALGORITHM says, or else chosen for each size by expected
                  time, see ``Communicator.explain``. Or one of your own, for calls of any size of
                  its collective: a function of the number of ranks that returns the moves of an
                  all-reduce, "file.py:function", or a ``dpcore.Schedule``.
    ``deterministic``  refuse algorithms whose result depends on how buffers are cut.
    ``join``      start alone, and be taken into the job that runs by ``dpcore.elastic``, which
                  needs its ``door=``. ``rank``, ``world_size``, ``init_method`` and ``transport``
                  then mean nothing. None is what DPCORE_JOIN says (1: join).
    ``device``    of the tensors, for backends on GPUs; by default torch's current one.

    >>> import dpcore
    >>> comm = dpcore.init(rank=0, world_size=1)
    >>> comm.world_size
    1
    >>> dpcore.finalize()
    """
    check_is("a string", backend=backend, transport=transport)
    check_is("a string", or_none=True, init_method=init_method, link=link)
    check_is("True or False", deterministic=deterministic)
    check_is("a number", timeout=timeout)
    if backend not in _BACKENDS:
        raise Unsupported(f"backend {backend!r} does not exist; choose from {_BACKENDS}")
    if device is not None and backend in ("native", "mpi", "torch"):
        raise Unsupported(f"device={device!r}: backend {backend!r} takes none; pass backend='nccl'")
    if transport not in _TRANSPORTS:
        raise Unsupported(f"transport {transport!r} does not exist; choose from {_TRANSPORTS}")
    if not timeout > 0:
        raise Unsupported(f"timeout {timeout!r}: a wait for another rank needs more than 0 seconds")
    if backend != "native" and link is None:
        check_no_link(f"backend={backend!r}")
    current_one = _current()
    if current_one is not None and not current_one.closed:
        raise Error(
            "init() was called before and its communicator is still open; call finalize() first, "
            "or make further groups with split()"
        )
    if backend == "torch":
        return _over_torch()
    if backend == "mpi":
        given = {
            "init_method": init_method,
            "transport": None if transport == "auto" else transport,
            "link": link,
            "algorithm": None if algorithm == "auto" else algorithm,
            "deterministic": deterministic or None,
        }
        return _over_mpi(rank, world_size, timeout, given)
    joins = is_on("DPCORE_JOIN") if join is None else join
    if joins:
        if backend != "native":
            raise Unsupported(f"join=True: ranks join a job of dpcore's own core, not {backend!r}")
        identity, transport = Identity(0, 1, f"joins-{os.getpid()}"), "shm"
    else:
        identity = find_identity(rank, world_size, init_method)

    algorithm = algorithm_or_variable(algorithm, identity.world_size)
    if transport == "auto":
        transport = "shm+tcp" if may_span_hosts(identity.world_size, init_method) else "shm"
    began_ns = time.time_ns()
    with contextlib.ExitStack() as stack:
        job = stack.enter_context(_instances.next(identity, transport == "inproc"))
        tcp = None
        if transport in ("tcp", "shm+tcp"):
            shares = transport == "shm+tcp"
            tcp = stack.enter_context(
                tcp_options(identity, job, init_method, timeout, shares_memory=shares)
            )
        stack.enter_context(advised(transport, init_method))
        communicator = connect(
            job,
            identity.rank,
            identity.world_size,
            timeout=timeout,
            transport=transport,
            tcp=tcp,
            link=link,
            algorithm=algorithm if backend == "native" else "auto",
            deterministic=deterministic and backend == "native",
        )
    choose_kernels()
    if transport != "inproc":
        share_processors(communicator._sharers)
    if backend != "native":
        from dpcore.comm.communicators.device import on_device

        communicator = on_device(
            communicator,
            backend,
            device,
            timeout=timeout,
            algorithm=algorithm,
            deterministic=deterministic,
        )
        _all.add(communicator)
        _announce(communicator, job, began_ns)
    if joins:
        communicator._joins_with = {
            "timeout": timeout,
            "link": link,
            "algorithm": algorithm,
            "deterministic": deterministic,
        }
    _set_current(communicator, transport == "inproc")
    return communicator


def algorithm_or_variable(algorithm: Any, world_size: int) -> Any:
    """What DPCORE_ALGORITHM says, where the program leaves it open. Raises what is wrong with it,
    before ranks wait for each other."""
    is_open = isinstance(algorithm, str) and algorithm == "auto"
    said = os.environ.get("DPCORE_ALGORITHM") if is_open else None
    try:
        _check_algorithm(said or algorithm, world_size)
    except Unsupported as problem:
        if not said:
            raise
        raise Unsupported(f"DPCORE_ALGORITHM={said}: {problem}") from None
    return said or algorithm


def _check_algorithm(algorithm: Any, world_size: int) -> None:
    if not is_own(algorithm):
        from dpcore import _C

        check_is("a string", algorithm=algorithm)
        _C.check_algorithm_name(algorithm)
        return
    from dpcore.base.own_algorithm import OwnAlgorithm
    from dpcore.comm.communicators.own_schedules import compiled

    if world_size > 1:
        compiled(algorithm, world_size)
    else:  # nothing runs
        OwnAlgorithm(algorithm)


def _over_torch() -> Communicator:
    import torch.distributed as dist

    from dpcore.comm.communicators.torch_group import TorchCommunicator

    if not (dist.is_available() and dist.is_initialized()):
        raise Unsupported(
            "backend='torch' uses the group of torch.distributed: call "
            "torch.distributed.init_process_group() first"
        )
    communicator: Any = TorchCommunicator()  # has its methods, though it is none
    _set_current(communicator, False)
    return communicator  # type: ignore[no-any-return]


def _over_mpi(
    rank: int | None, world_size: int | None, timeout: float, given: Mapping[str, Any]
) -> Communicator:
    """``given``: arguments that have no meaning for MPI, or None."""
    from dpcore.comm.communicators.mpi.start import start_mpi

    for name, value in given.items():
        if value is not None:
            raise Unsupported(
                f"backend='mpi' has no {name}: MPI chooses its ranks, transports and algorithms "
                "itself (OMPI_MCA_... and MPIR_CVAR_... choose them); use backend='native'"
            )
    began_ns = time.time_ns()
    communicator: Any = start_mpi(rank, world_size, timeout)  # has its methods, though it is none
    choose_kernels()
    of_ranks = communicator._heard(usable_processors())
    share_processors(sharers_among(of_ranks, communicator.rank))
    _all.add(communicator)
    _tell_peers_about_uncaught_errors()
    _announce(communicator, communicator.job, began_ns)
    _set_current(communicator, False)
    return communicator  # type: ignore[no-any-return]


def connect(
    job: str,
    rank: int,
    world_size: int,
    *,
    timeout: float,
    transport: str = "shm",
    tcp: _C.TcpOptions | None = None,
    link: str | None = None,
    algorithm: Any = "auto",
    deterministic: bool = False,
    meets_within: float = 0.0,
) -> Communicator:
    """A communicator of the ranks that meet under the name ``job``; it is never the default."""
    from dpcore import _C
    from dpcore.comm.communicators.native import Communicator

    link = link_or_variable(link, world_size)
    own = is_own(algorithm)
    began_ns = time.time_ns()  # no rank is done before the last one has come here
    known = _costs(rank, world_size, tcp, link)
    native = _C.start(
        job,
        rank,
        world_size,
        timeout=timeout,
        threads=transport == "inproc",
        tcp=tcp,
        link=None if link is None else _link_of(link, rank, world_size),
        algorithm="auto" if own else algorithm,
        deterministic=deterministic,
        costs=known.as_list(),
        meets_within=meets_within,
    )
    source = known.source if rank == 0 else "those of rank 0"
    communicator = Communicator(native, source, link or "")
    if own:
        communicator._run_by_default(algorithm)
    communicator._succeeded_by = _take_over
    _all.add(communicator)
    if transport != "inproc":
        _tell_peers_about_uncaught_errors()
        if world_size > 1:
            placement.watch(communicator)
    _announce(communicator, job, began_ns)
    return communicator


def _take_over(failed: Communicator, rest: Communicator) -> None:
    """What shrink() made takes the place of the one that failed, also as that of ``init``."""
    threads = rest.transport == "inproc"
    _all.add(rest)
    if not threads and rest.world_size > 1:
        placement.watch(rest)
    if _current() is failed:
        _set_current(rest, threads)


def replace(before: Communicator, after: Communicator) -> None:
    """``after`` is the communicator of ``init`` from now on, and ``before`` is closed."""
    if _current() is before:
        _set_current(after, False)
    before.close()


def _link_of(text: str, rank: int, world_size: int) -> _C.Link:
    """The network interface of a rank."""
    from dpcore import _C

    table = speeds(text, world_size)
    towards = [
        table[source][rank].bytes_per_second for source in range(world_size) if source != rank
    ]
    # Whatever any sender may send arrives; several at once share it.
    ingress = max(towards) if towards and all(towards) else 0.0
    own = [(to.bytes_per_second, to.latency, to.jitter, to.loss) for to in table[rank]]
    return _C.Link(rank, own, ingress, table[rank][rank].seed)


def _announce(communicator: Communicator, job: str, began_ns: int) -> None:
    """For what is plugged in: with DPCORE_TRACE, a trace of the run begins."""
    try:
        plugged_in.communicator_made(communicator, job, began_ns)
    except BaseException:
        communicator.close()
        raise


def _costs(rank: int, world_size: int, tcp: _C.TcpOptions | None, link: str | None) -> costs.Costs:
    """What algorithms are chosen by; those of rank 0 count."""
    from dpcore import _C

    is_near = tcp is None or _C.is_loopback(tcp.root)
    known = costs.load("loopback" if is_near else "network")
    if link is None or world_size == 1:
        return known
    return costs.over_link(known, speeds(link, world_size)[rank][(rank + 1) % world_size])


def current() -> Communicator:
    """The communicator that ``init`` returned last (in this thread, for ranks as threads)."""
    communicator = _current()
    if communicator is None:
        raise Error("there is no communicator yet; call dpcore.init() first")
    return communicator


def finalize() -> None:
    """Closes the communicator of ``init``: waits for what is in flight and leaves the group.

    Calling it twice, or without ``init``, does nothing. At the end of the program it is called
    for you. Raises when a wrapped model's last backward has missed parameters, and what
    ``Communicator.close`` raises. In a ``finally``, ranks that still need this one hear of the
    exception that is on its way.
    """
    communicator = _current()
    if communicator is not None:
        record_error = getattr(_native_of(communicator), "record_error", None)
        if record_error is not None and (problem := on_its_way()):
            record_error(problem)
        try:
            for check in _before_finalize:
                check(communicator)
        finally:
            _set_current(None, communicator.transport == "inproc")
            communicator.close()


def call_before_finalize(check: Callable[[Communicator], None]) -> None:
    """``finalize`` closes the communicator and raises what this raises."""
    _before_finalize.append(check)


def _current() -> Communicator | None:
    of_thread: Communicator | None = getattr(_of_thread, "communicator", None)
    return of_thread if of_thread is not None else _of_process


def _set_current(communicator: Communicator | None, threads: bool) -> None:
    global _of_process
    if threads:
        _of_thread.communicator = communicator
    else:
        _of_process = communicator


def opened() -> Communicator | None:
    """The communicator that ``current`` would return, if it can be used."""
    communicator = _current()
    return None if communicator is None or communicator.closed else communicator


# The communicators of its parent are not a forked child's to close; those that it makes are.
os.register_at_fork(after_in_child=_all.clear)
_hook_before: Callable[..., Any] | None = None


def _tell_peers_about_uncaught_errors() -> None:
    """Ranks that wait for one that dies of an exception then raise with the exception's text."""
    global _hook_before
    if _hook_before is None:
        _hook_before, sys.excepthook = sys.excepthook, _abort_all


def _native_of(communicator: Any) -> Any:
    return getattr(communicator, "_native", None)  # CuPy's has none


def _abort_all(
    kind: type[BaseException], problem: BaseException, where: TracebackType | None
) -> None:
    """A communicator that has failed has told its peers already, and those split from the same one
    as it tell theirs when they leave. So an ``Error`` ends only the others: it may be one that this
    rank alone knows of, such as a wrong argument."""
    for communicator in list(_all):
        has_failed = getattr(_native_of(communicator), "family_failed", False)
        if not (communicator.closed or (has_failed and isinstance(problem, Error))):
            with contextlib.suppress(Error):
                communicator.abort(f"{kind.__name__}: {problem}")
    assert _hook_before is not None
    _hook_before(kind, problem, where)


@atexit.register
def _close_all() -> None:
    for communicator in list(_all):  # whatever one of them raises
        with heard_at_exit():
            communicator.close()


def closes_at_exit(group: Any) -> bool:
    """Whether it is a communicator that closes when this process ends, and this rank with it."""
    known = [one for one in _all if one is group]
    return any(not one.closed and one.transport != "inproc" for one in known)


@contextlib.contextmanager
def heard_at_exit() -> Iterator[None]:
    """For what is done at the end of a program, where Python only prints an exception. One that
    tells of a failure is shown as elsewhere, and the program ends with status 1 in place of 0; but
    not where it died of something else, of which this is a consequence."""
    try:
        yield
    except Error as problem:
        if getattr(sys, "last_value", None) is None:
            show = _hook_before or sys.excepthook
            show(type(problem), problem, problem.__traceback__)
            ends_with_error()


def ends_with_error() -> None:
    """This program does, where its status would be 0: nobody was there to catch a failure."""
    from dpcore import _C

    _C.end_with_error()
