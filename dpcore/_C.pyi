"""The compiled core. Programs use the package ``dpcore``, which adds defaults and documentation."""

from abc import ABCMeta
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from dpcore.reference import launch_schedule
from dpcore.reference.launch_schedule import LaunchSchedule

_Function = TypeVar("_Function", bound=Callable[..., Any])
# (step, src, dst, chunk, reduce)
_Move = tuple[int, int, int, int, bool]
# The fields of dpcore.recorder.file.Event.
_TraceEvent = tuple[str, str, int, int, int, int, int, int, str, str, int, int, int]

# ---- schedules -------------------------------------------------------------------------------

class Schedule:
    """A list of moves (step, src, dst, chunk, reduce)."""

    def __init__(
        self,
        algorithm: str,
        collective: str,
        world: int,
        chunks: int,
        moves: Sequence[_Move],
        root: int = 0,
        ordered: bool = False,
    ) -> None:
        """A schedule of one's own. check_schedule tells whether it is right."""

    @property
    def algorithm(self) -> str:
        """The name it was given."""

    @property
    def collective(self) -> str:
        """What it is a schedule of, such as "all_reduce"."""

    @property
    def world(self) -> int:
        """The number of ranks."""

    @property
    def chunks(self) -> int:
        """In how many parts the buffer is cut."""

    @property
    def root(self) -> int:
        """The root of a rooted collective, otherwise 0."""

    @property
    def ordered(self) -> bool:
        """Whether it promises to add the contributions of each chunk at once, in rank order."""

    def _repr_html_(self) -> str | None:
        """For notebooks: move by move."""

    @property
    def moves(self) -> list[_Move]:
        """The moves (step, src, dst, chunk, reduce), sorted by step."""

def schedule(
    algorithm: str, collective: str, world: int, root: int = 0, hosts: Sequence[int] = ()
) -> Schedule:
    """The moves of a known algorithm. hosts: equal numbers for ranks that share one."""

def collectives() -> list[tuple[str, str, str, bool, bool, bool]]:
    """(name, gives, gets, reduces, comes from root, goes to root) each. A rank gives and gets
    "nothing", the "whole" of one buffer, its "own part", or "all parts"."""

def algorithms_of(collective: str) -> list[str]:
    """The names that schedule() takes for a collective."""

def check_algorithm_name(name: str) -> None:
    """Raises Unsupported unless it is "auto", or the name of a collective's algorithm."""

def check_schedule(schedule: Schedule) -> None:
    """Raises Error, naming the first wrong move, unless the schedule is right for any data."""

def completing_moves(schedule: Schedule) -> list[bool]:
    """For each move, whether it reduces and its destination is complete after its step."""

def order_of_chunks(schedule: Schedule, rank: int) -> list[int]:
    """In which order a rank works at the chunks: as it sends them, as it receives them, others."""

def turns(schedule: Schedule, rank: int) -> list[tuple[int, int, int, int, int, int]]:
    """For each message that a rank sends: step, receiver, chunk; source and chunk of what has to
    come first, and how many segments ago."""

def is_ordered(schedule: Schedule) -> bool:
    """Whether all contributions to a chunk are added at once, in rank order."""

def schedule_cost(schedule: Schedule, count: int, element_bytes: int) -> dict[str, int]:
    """Steps and bytes; count is the whole buffer for all_reduce, broadcast, reduce, else a chunk."""

def expected_seconds(
    schedule: Schedule, hosts: list[int], costs: list[float], nbytes: int
) -> float:
    """What the choice of algorithms expects of a schedule; costs as default_costs() lists them."""

def chunk_range(count: int, chunks: int, index: int) -> tuple[int, int]:
    """The bounds (begin, end) of one of `chunks` nearly equal parts of `count` elements."""

def check_memory(tensor: torch.Tensor, role: str) -> None:
    """Raises Unsupported, which says what it is, for a tensor whose elements lie in no memory."""

# ---- communicators ---------------------------------------------------------------------------

def default_costs() -> list[float]:
    """Of a machine that is not calibrated, in the order of start()."""

def start(
    job: str,
    rank: int,
    world_size: int,
    timeout: float,
    threads: bool,
    tcp: TcpOptions | None,
    link: Link | None,
    algorithm: str,
    deterministic: bool,
    costs: Sequence[float],
    meets_within: float = 0.0,
) -> Communicator:
    """Meets the other ranks under the name of the job, within ``timeout`` unless told otherwise."""

def make_torch_backend(
    communicator: Communicator,
    store: Any,
    timeout: float,
    name: str,
    global_ranks: Sequence[int],
    cuda: str = ...,
    algorithm: str = ...,
    deterministic: bool = ...,
    libraries: Sequence[str] = ...,
    host_uuid: str | None = ...,
    refusal: str = ...,
) -> TorchBackend:
    """A torch.distributed.Backend over the communicator. ``cuda``, ``algorithm`` and
    ``deterministic`` are for tensors on GPUs. ``host_uuid`` is for tests: tensors of the CPU count as
    those of a device of the host. ``refusal``, unless empty, is the error for tensors on GPUs."""

class TorchBackendOptions:
    """Those of a process group; torch's ``Backend.Options`` has the other names."""

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchBackendOptions:
        """torch copies the options of a group that it splits."""

class TorchBackend:
    """The backend of a process group; torch's ``Backend`` has the other methods."""

    @property
    def options(self) -> TorchBackendOptions:
        """Of the group."""

    def perform_nocolor_split(self, device: Any) -> None:
        """What torch asks of ranks that are in no part of a split: nothing."""

    def device_libraries(self) -> dict[str, tuple[str, str]]:
        """By device, which communicator carries its operations, and over what."""

def flight_entries() -> list[dict[str, Any]]:
    """The last operations of the backends of this process, the oldest first."""

class TcpListener:
    """Where rank 0 awaits the others."""

    @staticmethod
    def at(address: str, interface: str = "") -> TcpListener:
        """At host:port, or at the interface with this port."""

    @staticmethod
    def towards(address: str, interface: str = "") -> TcpListener:
        """At a free port of the interface that leads to host:port."""

    @property
    def address(self) -> str:
        """host:port, in numbers."""

class TcpOptions:
    """How ranks that share no memory meet."""

    def __init__(
        self,
        root: str,
        listener: TcpListener | None,
        interface: str,
        secret: str,
        sockets: int,
        shares_memory: bool = False,
        host_label: str = "",
    ) -> None:
        """root: where rank 0 listens; listener: rank 0's own; sockets for data, per peer;
        whether ranks of one host share memory, and what keeps ranks of one host apart."""

    @property
    def root(self) -> str:
        """Where rank 0 listens."""

class Link:
    """A network interface that is emulated."""

    def __init__(
        self,
        rank: int,
        to: Sequence[tuple[float, float, float, float]],
        ingress: float,
        seed: int,
    ) -> None:
        """to: bytes per second, latency, jitter, loss, by rank; ingress: bytes per second."""

    def send(self, peer: int, nbytes: int, priority: int, now: int) -> int:
        """For tests, on a NIC of no communicator: a message is ready; what it is called."""

    def arrival(self, ticket: int, now: int) -> int | None:
        """When its last byte will have arrived, in ns; None while the NIC has not taken it."""

    def withdraw(self, ticket: int) -> None:
        """The message will not be sent."""

def hmac_sha256(key: str | bytes, message: str | bytes) -> bytes:
    """The digest by which ranks prove that they know the secret."""

def is_loopback(address: str) -> bool:
    """Whether host:port can be reached from this host only."""

def knows_users_at(address: str) -> bool:
    """Whether the kernel says which user a process is of that connects from this host to
    host:port, an address of this host."""

class Communicator:
    """A group of ranks."""

    @property
    def rank(self) -> int:
        """This rank's number in the group."""

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""

    @property
    def closed(self) -> bool:
        """Whether close() was called."""

    @property
    def failed(self) -> bool:
        """Whether an operation failed, after which every call raises."""

    @property
    def family_failed(self) -> bool:
        """Whether this communicator failed, or one that was split from the same one."""

    def record_error(self, error: str, /) -> None:
        """What the peers of this and its sibling communicators hear, if they still need this rank
        when it leaves. A failure that came before goes first."""

    # The options of these are those of dpcore.Communicator; what one has no use for is ignored.
    def all_reduce(self, tensor: Any, /, **options: Any) -> Work | None:
        """In place."""

    def broadcast(self, tensor: Any, /, **options: Any) -> Work | None:
        """In place."""

    def reduce(self, tensor: Any, /, **options: Any) -> Work | None:
        """In place."""

    def reduce_scatter(
        self, output: Any | None, input: Any | None, /, **options: Any
    ) -> Work | None:
        """With a part per rank; one list of sizes stands for both."""

    def all_gather(self, output: Any | None, input: Any | None, /, **options: Any) -> Work | None:
        """The same."""

    def gather(self, output: Any | None, input: Any | None, /, **options: Any) -> Work | None:
        """The same; the output is None but on the root."""

    def scatter(self, output: Any | None, input: Any | None, /, **options: Any) -> Work | None:
        """The same; the input is None but on the root."""

    def all_to_all(self, output: Any | None, input: Any | None, /, **options: Any) -> Work | None:
        """With two lists of sizes."""

    def send(self, tensor: Any, peer: int, /, **options: Any) -> Work | None:
        """A message to another rank."""

    def recv(self, tensor: Any, peer: int | None, /, **options: Any) -> Work | None:
        """A message from another rank; None takes it from any."""

    def barrier(self, **options: Any) -> Work | None:
        """Completes when every rank has entered it."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, /) -> torch.Tensor:
        """A tensor in the arena."""

    def split(self, color: int, key: int, /) -> Communicator | None:
        """The group of the ranks with this color; None for a negative one."""

    def shrink(self, patience: float, /) -> Communicator:
        """The ranks that live, after a failure; 0: the timeout."""

    def grow(
        self,
        count: int,
        invite: Callable[[str, str, bool], None] | None,
        are_gone: Callable[[], bool] | None,
        patience: float,
    ) -> Communicator:
        """With so many ranks that join, behind these; or without, see shrink()."""

    @property
    def timeout(self) -> float:
        """Seconds, of an operation."""

    @property
    def address(self) -> str:
        """Of this rank, where ranks of other hosts reach it; empty where there are none."""

    def let_go_of_before(self) -> None:
        """All members are known to be in what grow() returned."""

    @property
    def survivors(self) -> list[int]:
        """The members' ranks in the communicator that was shrunk."""

    @property
    def completed_before(self) -> int:
        """Operations that all of them had completed there."""

    def run_by_default(self, schedule: Schedule, /) -> None:
        """Lets calls of its collective that name no algorithm run it; before the first call."""

    def unacknowledged_failure(self) -> tuple[str, str] | None:
        """(name of the class in dpcore.errors, message) if it failed and nothing has raised that."""

    def abort(self, reason: str, /) -> None:
        """Breaks the communicator for all ranks."""

    def close(self) -> None:
        """Waits for what is in flight and leaves."""

    @property
    def transport(self) -> str:
        """How the members reach each other."""

    @property
    def hosts(self) -> list[int]:
        """By rank: equal numbers for ranks that share memory."""

    @property
    def sharers(self) -> int:
        """How many ranks may run on the processors that this one may use, itself among them."""

    @property
    def costs(self) -> list[float]:
        """The constants of the cost model that the ranks agreed on, in the order of start()."""

    def explain(self, collective: str, nbytes: int) -> dict[str, Any]:
        """Which algorithm "auto" is, and what the model expects of all."""

    def stats(self) -> dict[str, Any]:
        """Counters by collective and path."""

    def show_placement(self, placement: str, since_ns: int) -> None:
        """Notes in the black box where the program is, and since when (of the monotonic clock)."""

    def start_trace(self, capacity: int, /) -> None:
        """Begins to record into a ring of this many events."""

    def stop_trace(self) -> tuple[list[_TraceEvent], int, dict[str, Schedule]]:
        """Ends it: events, how many were overwritten, the lists of moves that events name."""

    def latency_loop(self, nbytes: int, iterations: int, /) -> float:
        """Seconds per all-reduce in the arena, without Python in between."""

class FirstFailure:
    """The life of a failure: the first one stays, and every later call raises it again."""

    def set(self, error: str, message: str) -> bool:
        """Whether it is the first. ``error``: name of the class in dpcore.errors."""

    @property
    def is_set(self) -> bool:
        """Whether there is one."""

    def check(self) -> None:
        """Raises it, if there is one."""

    def acknowledge(self) -> None:
        """The program knows of it."""

    def told(self) -> tuple[str, str]:
        """(name of the class in dpcore.errors, message); the program knows of it from now on."""

    def told_if_unacknowledged(self) -> tuple[str, str] | None:
        """The same of one that the program does not know yet."""

class Work:
    """An asynchronous operation."""

    def wait(self, timeout: float = 0.0) -> None:
        """Returns when it is complete, raises when it failed; 0 waits for the operation's deadline."""

    def is_completed(self) -> bool:
        """Whether it is complete, failed ones included."""

    def failure(self) -> tuple[str, str] | None:
        """(name of the class in dpcore.errors, message) of one that failed."""

    @property
    def source(self) -> int | None:
        """The other rank of a message, once it is known."""

    def describe(self) -> str:
        """What it is, as messages call it."""

    def when_complete(self, call: Callable[[], object]) -> None:
        """Calls once it is complete, on the thread that completes it, or at once."""

class StreamCommunicator(Communicator):
    """A group of ranks with a device each; work is ordered by streams, see csrc/cuda."""

    @property
    def backend(self) -> str:
        """Who moves the bytes."""

    @property
    def device(self) -> str:
        """Where: "cuda:0"."""

    @property
    def library(self) -> str:
        """With what: version and path."""

    @property
    def control(self) -> Communicator:
        """The communicator on the host over the same ranks."""

    def paths(self) -> dict[str, int]:
        """How often operations took which path, where there are several."""

    def watch(self, on: bool, /) -> None:
        """Records events of streams, for `sums`."""

    def mark(self) -> int:
        """What is recorded from here on comes after it."""

    def sums(self, after: int, until: int, /) -> tuple[int, ...] | None:
        """Of the step between two marks, in ns: until the next one begins to compute, computing,
        exposed, communication. None while the device is not done with it; empty where it is lost.
        """

    def messages(
        self, messages: Sequence[tuple[bool, Any, int]], timeout: float, asynchronous: bool, /
    ) -> StreamWork | None:
        """(sends, tensor, peer) each; they travel at the same time."""

class StreamWork(Work):
    """An asynchronous operation on a device."""

def start_on_device(
    control: Communicator,
    device: str,
    timeout: float,
    algorithm: str,
    deterministic: bool,
    libraries: Sequence[str] = (),
    backend: str = "auto",
    uuid: str = "",
) -> StreamCommunicator:
    """Meets the ranks of `control` over NCCL ("nccl") or memory of devices that they map ("cuda");
    "auto" is whichever fits the devices of all ranks. Device "host" is one without a GPU, for
    tests; `uuid` is what it says to be. `libraries` are paths at which NCCL may be."""

def nccl_library(libraries: Sequence[str]) -> dict[str, Any]:
    """path, version and found_by of the NCCL that this process uses."""

# ---- data parallel training ------------------------------------------------------------------

class LaunchControl(launch_schedule.LaunchControl, metaclass=ABCMeta):
    """What the methods of a LaunchSchedule get."""

def first_with_nan(tensors: list[torch.Tensor], /) -> int | None:
    """The place of the first one that has a NaN. They are dense, on the CPU."""

def hash_of_sizes(tensors: list[torch.Tensor | None], /) -> int:
    """Equal for lists whose tensors have equal shapes."""

def plan_buckets(
    sizes: Sequence[int], kinds: Sequence[int], order: Sequence[int], caps: Sequence[int]
) -> list[list[int]]:
    """Which gradients travel together, as dpcore.reference.buckets has it."""

class WarmMemory:
    """Until it is closed, torch's large blocks on the CPU come from a pool (csrc/tensors)."""

    def close(self) -> None:
        """Once is enough."""

def warm_memory_figures() -> dict[str, int]:
    """Whether the pool is_on; bytes used, kept, and used at most; blocks so far that were warm, and
    mapped."""

def end_warm_window() -> None:
    """What the pool has not needed in this window goes back, as the clock has it every seconds."""

class Reducer:
    """Averages gradients while backward makes them. DataParallel is its face."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        sparse: Sequence[bool],
        modules: Sequence[Sequence[int]],
        group: Any,
        schedule: str | LaunchSchedule,
        caps: Sequence[int],
        find_unused: bool,
        grad_is_part: bool,
        skip_unused: bool,
        static_graph: bool,
        born: bool,
        finds_mistakes: bool,
        ordered: bool,
        deterministic: bool,
        profiled_as: str,
        reduce_sparse: Callable[[Sequence[int]], None],
        update: Callable[[list[int]], None],
        differ: Callable[[int, list[tuple[Any, ...]]], None],
        tag: int,
        traced_as: int,
        model: str,
        advice: str,
    ) -> None:
        """Puts hooks on the parameters; they go with the object."""

    def begin_forward(self) -> None:
        """Waits for what is in flight; raises when the last backward was incomplete."""

    def end_forward(self, synchronised: bool, outputs: Sequence[torch.Tensor], /) -> None:
        """Expects gradients, of what the outputs reach when unused ones are to be found."""

    def forward_of_module_begins(self, module: int, /) -> None:
        """Tells the schedule."""

    def optimizer_steps(self) -> None:
        """Tells the schedule, and waits for what it leaves in flight even then."""

    def wait_for_gradients(self) -> None:
        """Waits for what a schedule left in flight at the end of backward."""

    def name_of(self, gradient: int, /) -> str:
        """The name of its parameter."""

    def say(
        self,
        optimizers: list[Any],
        modules: list[Any],
        loads: int,
        inputs: tuple[Any, ...],
        named: dict[str, Any],
        /,
    ) -> None:
        """Writes this rank's word of the next step: of the groups of its optimizers, and so on."""

    def optimizer_stepped(self) -> None:
        """Counts a step of an optimizer of these parameters, and takes a digest of them."""

    @property
    def has_local_gradients(self) -> bool:
        """Whether gradients came that no average has taken along."""

    def local_gradients(self) -> list[int]:
        """Their numbers."""

    @property
    def has_edited_local_gradients(self) -> bool:
        """Whether the program has changed them since they came."""

    def rebase_optimizer_steps(self, steps: int, /) -> None:
        """Sets the count of the optimizer's steps, for ranks whose parameters are equal."""

    def say_knocks(self, knocks: int, /) -> None:
        """How many ranks wait at this one's door, for the next word."""

    @property
    def knocks(self) -> int:
        """How many wait at all doors, by the words of the last step."""

    def add_unaveraged_step(self) -> int:
        """Says in the next word that an optimizer has used them. Returns how many such steps there
        were since the ranks' parameters were last seen to be equal."""

    @property
    def local_forwards(self) -> int:
        """Training forwards without averaging since the last step with it."""

    @property
    def has_changed_since_digest(self) -> bool:
        """Whether the program has changed parameters since an optimizer's last step."""

    def set_known_findings(self, findings: int, /) -> None:
        """What need not be reported again."""

    def digest(self, label: int, on_device: bool, /) -> int:
        """Of a cache line of each parameter that the label names; 0 names all."""

    def update_steps(self) -> bool:
        """An optimizer has recorded its step; False when there is nothing in flight that it is of."""

    def flush(self) -> None:
        """Finishes a recorded step, so that parameters are those after it."""

    def finish_phases(self) -> None:
        """Ends what is in flight; without a recorded step nothing is updated."""

    def set_modules(self, modules: Sequence[Sequence[int]], /) -> None:
        """The gradients of the parameters that each module needs, in the order of need."""

    def parameters_of(self, bucket: int, /) -> torch.Tensor:
        """Flat memory in which the bucket's parameters may lie as its gradients do."""

    def flat_of(self, bucket: int, /) -> torch.Tensor:
        """The flat memory of the bucket's gradients."""

    def part_of(self, bucket: int, /) -> torch.Tensor:
        """This rank's part of the bucket's averages, as flat memory."""

    @property
    def whole_buckets(self) -> int:
        """How many buckets have memory for whole gradients at a time; 0: all."""

    def is_current(self, gradient: int, /) -> bool:
        """Whether forward may read the parameter of this gradient."""

    @property
    def buckets(self) -> int:
        """How many there are."""

    @property
    def is_in_flight(self) -> bool:
        """Between a backward and the end of the next forward, while anything is in flight."""

    @property
    def has_failed(self) -> bool:
        """Whether an error of a bucket on its way was raised."""

    @property
    def phases(self) -> list[str]:
        """The phases of a bucket under the schedule, by name."""

    def is_averaged(self, gradient: int, /) -> bool:
        """False within a backward that has not brought the average of this gradient yet."""

    def share_parameters_with(self, other: Reducer, /) -> None:
        """Gradients belong to the one of both whose forward ran last. Tell both."""

    def defer_by(self, guard: Callable[[bool], bool], /) -> None:
        """guard(True): buckets are in flight at the end of backward, so nothing may read their
        gradients without wait_for_gradients(); False when that cannot be had. guard(False): they
        are final."""

    def check_complete(self) -> None:
        """Raises with their names when the last backward has missed parameters."""

    def outermost_backward_begins(self) -> None:
        """Its end is the end of backward, whatever runs of autograd there are within."""

    def shadow_backward(self) -> None:
        """Takes part in a backward of the other ranks with zeros."""

    def set_scale(self, scale: float, /) -> None:
        """A factor of all averages."""

    def use_hook(self, runner: Any, /) -> None:
        """An object with start, wait, abandon and buckets_changed, or None, for all-reduces."""

    def reduce_as(self, dtype: torch.dtype, /) -> None:
        """Buckets of wider types travel as this one."""

    def set_static_graph(self) -> None:
        """Records the graph in the first backward, which must not have been yet."""

    def measure_norms(self, variance: float, /) -> None:
        """Of the gradients of the next backward. ``variance``: of this rank's gradient, as a
        multiple of that of one sample's; all ranks call it before the same forward."""

    def take_norms(self) -> list[tuple[int, float, float, float]]:
        """Of each measured step its number (``completed`` before it), the ranks' mean of the squared
        norms of their gradients, that of ``variance``, and the squared norm of the mean."""

    @property
    def finds_not_finite(self) -> bool:
        """Whether gradients with NaN or Inf are found while they are added."""

    @property
    def not_finite(self) -> tuple[int, str, int, list[int], int, int, int, int, int, str] | None:
        """The first gradient with NaN or Inf of the last step, as far as this rank has seen: see
        ``dpcore.ddp.mistakes.not_finite.Found``."""

    def stop_listening(self) -> None:
        """Takes its hooks from the parameters."""

    def sample_every(self, steps: int, /) -> None:
        """Of the times that are kept, after the first ten steps."""

    def bucket(self, number: int, /) -> tuple[torch.Tensor, list[int], list[torch.Tensor]]:
        """Its memory, the numbers of its gradients, and their parts of it."""

    def times(self) -> dict[str, int]:
        """Of the step that was sampled last, and averages; nanoseconds."""

    def watch(self, on: bool, /) -> None:
        """Whether ``sums`` counts all of what it holds."""

    def sums(self) -> tuple[int, int, int, int, int]:
        """Since the beginning: backwards whose gradients were averaged, nanoseconds of computing and
        of waiting; while somebody watches, nanoseconds with buckets on their way, and bytes."""

    @property
    def is_incomplete(self) -> bool:
        """Whether a backward has begun to bring gradients and not brought all."""

    def cut_instead_of_raising(self, on: bool, /) -> None:
        """Whether ``PeerLost`` and ``Timeout`` in backward are not raised: see ``is_cut``."""

    @property
    def is_cut(self) -> bool:
        """Whether one of these has ended a backward. Nothing has been averaged since."""

    @property
    def has_ended_incomplete(self) -> bool:
        """The same, when that backward is over and was not interrupted."""

    @property
    def is_graph_static(self) -> bool:
        """Whether the unused parameters were the same ones in all steps."""

    @property
    def used_counts(self) -> list[int]:
        """How many ranks had each gradient, when that was agreed on last."""

    @property
    def completed(self) -> int:
        """Steps."""

    @property
    def early_gradients(self) -> int:
        """Gradients of the last step that left while a compiled backward was running."""

    @property
    def compiled_gradients(self) -> int:
        """Gradients that compiled backwards delivered, early or not, in the last step that was
        looked at: each until the buckets are rebuilt, then the one after look_again()."""

    @property
    def declined_gradients(self) -> dict[str, str]:
        """Names of gradients that the last step's compiled backwards announced while they ran, and
        why each was left until autograd delivered it."""

    def look_again(self) -> None:
        """Counts compiled_gradients in the next backward."""

    def rebuild(self, order: Sequence[int], caps: Sequence[int]) -> None:
        """Plans the buckets anew for gradients that arrive in this order, with these caps from now
        on, or none for those that were."""

    def use_schedule(self, schedule: str, /) -> None:
        """From the next forward on; one that cuts buckets as the one before."""

    @property
    def backward_ns(self) -> int:
        """How long the last backward took, from its first gradient until all were final."""

    @property
    def wants_rebuild(self) -> bool:
        """Whether the first complete iteration is over and the buckets are still the first ones."""

    @property
    def has_rebuilt(self) -> bool:
        """Whether rebuild() was called."""

    @property
    def arrival_order(self) -> list[int]:
        """Gradients in the order of the last iteration."""

    @property
    def arrival_ns(self) -> list[int]:
        """When they came, until the buckets are rebuilt."""

    @property
    def schedule(self) -> str:
        """Its name."""

    @property
    def is_exact(self) -> bool:
        """Whether the schedule communicates everything."""

    @property
    def wants_forward(self) -> bool:
        """Whether the schedule listens to the forwards of modules."""

    @property
    def wants_optimizer(self) -> bool:
        """Whether the schedule listens to optimizer steps."""

    @property
    def is_recorded(self) -> bool:
        """Whether a trace of the group records."""

    def forward_begins(self) -> None:
        """For a trace, which records what is between it and forward_ends()."""

    def forward_ends(self) -> None:
        """See forward_begins()."""

    def backward_begins(self) -> None:
        """Backward begins now; its end is seen by the reducer."""

    def copies(self) -> dict[str, int]:
        """Launches, gradients that they copied together, and gradients that were copied alone; those
        that were born in their buckets, and buckets that were left to other holders."""

    def births(self) -> list[str] | None:
        """How each gradient came into its bucket last: csrc/reducer/backward/birth_plan.h."""

    def report(self) -> list[dict[str, Any]]:
        """The buckets with their times."""

def _process_mark() -> int:
    """A number that no other process of this host has."""

def _choose_memory(ranks: Sequence[tuple[int, bool, bool]], wish: str) -> str:
    """How ranks (process, has descriptors, has ipc) get to each other's device memory."""

def _choose_barrier(uuids: Sequence[str], wish: str) -> str:
    """How ranks on these GPUs wait for each other: "stream" or "fused"."""

def quick_method(
    function: _Function, names: tuple[str, ...], positional: int, operators: tuple[str, ...]
) -> _Function:
    """A method whose plain calls go straight to the core's method of the same name."""

# ---- parts, machine, inspection --------------------------------------------------------------

def _reduce(
    dtype: str,
    op: str,
    inputs: Sequence[int],
    outputs: Sequence[int],
    count: int,
    post: float = 1.0,
    pre: Sequence[float] | None = None,
    takes_over: bool = False,
    workers: int = 0,
    device: str = "",
    divisor: int = 1,
    looks: bool = False,
) -> tuple[int, int, int] | None:
    """Reduces `count` elements at the addresses `inputs` into `outputs`; with workers > 0 as
    kernels on a GPU do, by so many threads, but on the host; with a device ("cuda:0") there.
    If it looks for NaN and Inf, in sums without factors: the first input that has one (-1: none,
    the sum overflowed), its element, and a bit for each input that has one near there."""

def _copy_parts(
    parts: Sequence[tuple[int, int, int]],
    part_type: str,
    flat: int,
    flat_type: str,
    to_flat: bool,
    factor: float = 1.0,
    workers: int = 1,
    device: str = "",
) -> int:
    """Copies tensors (address, byte in the flat buffer, elements) as a GPU would, but on the host, or
    on a device ("cuda:0"); returns how many launches it takes."""

def _copy_bytes(dst: int, src: int, n: int, way: str = "") -> None:
    """Copies n bytes between two addresses, "to peers", "from a peer" or "taking over"."""

def simd_level() -> str:
    """The instruction set of the reduction kernels: avx512, avx2 or portable."""

def cuda_probe() -> dict[str, Any]:
    """What of CUDA works here: built, runtime_version, driver_version, devices, problem."""

def end_with_error() -> None:
    """This program ends with status 1 if it would with 0."""

def longest_wait() -> tuple[float, float]:
    """Of what this process waits in, the operation that was called first: the seconds since then,
    and its timeout. Zeros where it waits for nothing."""
