"""Which tool measures what: a table of docs/compatibility.md, which tests/test_measuring.py holds.

A cell without a reason works. A reason names the fact that is missing there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

SCHEDULES: dict[str, tuple[str, ...]] = {
    "within a step": ("auto", "bucketed", "sequential", "per_parameter", "flat", "own"),
    "priority, dear": ("priority", "dear"),
    "zero1, zero2": ("zero1", "zero2"),
    "LocalSGD, DiLoCo": ("local_sgd", "diloco"),
    "torch DDP": ("torch",),
}
PLACES = (
    "one host",
    "hosts over TCP",
    "group of torch",
    "group of MPI",
    "GPU, NCCL or mapped memory",
    "GPU, group of torch",
)
TOOLS = ("trace and show", "monitor", "noise scale", "measure_overlap", "compare")

_NO_MEAN = "no rank has the mean of all gradients at the end of a step"
_LOCAL = "a step of a rank sends nothing; dp.trace shows the syncs"
_TORCHS = (
    "torch's reducer keeps its times to itself; dpcore show reads the file of torch.profiler, and "
    "dpcore compare measures it from outside"
)
_UNHEARD = "torch's group does not say when its operations ran; torch.profiler and dpcore show do"
OF_SCHEDULES: dict[tuple[str, str], str] = {
    ("noise scale", "priority, dear"): _NO_MEAN,
    ("noise scale", "zero1, zero2"): _NO_MEAN,
    **{(tool, "LocalSGD, DiLoCo"): _LOCAL for tool in TOOLS[1:4]},
    **{(tool, "torch DDP"): _TORCHS for tool in TOOLS[1:4]},
}
OF_PLACES: dict[tuple[str, str], str] = {
    ("trace and show", "group of torch"): _UNHEARD,
    ("trace and show", "GPU, group of torch"): _UNHEARD,
    (
        "monitor",
        "GPU, group of torch",
    ): f"{_UNHEARD}, so lines have the time of a step and bytes alone",
    ("measure_overlap", "GPU, group of torch"): _UNHEARD,
    ("noise scale", "GPU, group of torch"): "it has not run there yet",
    **{
        ("compare", place): "its ranks train on the CPU, over dpcore's core and over Gloo"
        for place in PLACES[3:]
    },
}


def lines() -> Iterator[str]:
    yield "What measures a training, and under which schedule. `tests/test_measuring.py` runs cells"
    yield "on one host and over TCP, `tests/compare` those of `dpcore compare`, and `tests/show`"
    yield "reads torch DDP's profiles:"
    numbers: dict[str, int] = {}
    yield from _table(tuple(SCHEDULES), OF_SCHEDULES, numbers)
    yield ""
    yield "And over what, with schedules within a step (`tests/test_measuring.py`,"
    yield "`tests/cuda_host/test_measuring.py` on devices of the host):"
    yield from _table(PLACES, OF_PLACES, numbers)
    yield ""
    for reason, number in numbers.items():
        yield f"{number}. {reason[0].upper()}{reason[1:]}."


def _table(
    columns: Sequence[str], reasons: Mapping[tuple[str, str], str], numbers: dict[str, int]
) -> Iterator[str]:
    yield ""
    yield f"| | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for tool in TOOLS:
        cells = []
        for column in columns:
            reason = reasons.get((tool, column), "")
            if reason:
                numbers.setdefault(reason, len(numbers) + 1)
            cells.append(f"no ({numbers[reason]})" if reason else "yes")
        yield f"| {tool} | {' | '.join(cells)} |"
