"""The table of docs/gpu.md: what was measured on a GPU, with its bound or its peer."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.figures import place_of, time_text

_ARRAYS = 8  # of reductions, those of so many: others are the same within a percent
_WAYS = {"stream": "streams wait", "fused": "kernels wait"}
_AWAITED = {"each": "", "on the host": ", awaited on the host"}
_MODELS = {
    "gpt2-124m-bf16": "GPT-2, 124 M parameters in bfloat16",
    "resnet50-bf16": "ResNet-50 in bfloat16",
    "400-tensors": "400 tensors of 256 B to 16 KiB",
}


def table_of_gpu(runs: list[dict[str, Any]]) -> str:
    """Of each section the newest rows. A run is what `python -m benchmarks.gpu` writes."""
    sections: dict[str, list[dict[str, Any]]] = {}
    used: dict[str, dict[str, Any]] = {}
    for run in runs:
        for name in dict.fromkeys(row["section"] for row in run["results"]):
            sections[name] = [row for row in run["results"] if row["section"] == name]
            used[name] = run
    lines = ["| | dpcore | beside it | ratio | target |", "|---|---:|---|---:|---:|"]
    for name, rows in sections.items():
        copy = next(row for row in used[name]["results"] if row["what"] == "copy")
        lines += [line for row in rows if (line := _of_a_copy(row, copy) or _of_torch(row, rows))]
    commits: dict[str, dict[str, None]] = {}
    for run in used.values():
        machine = (
            f"one {run['gpu']} (driver {run['driver_release']}, CUDA {run['torch_cuda']}, NCCL "
            f"{run['nccl']['version']}, torch {run['torch']})"
        )
        changed = "+" if "+" in run["commit"] else ""
        said = f"{run['commit'][:10]}{changed} on {run['date'][:10]}"
        commits.setdefault(machine, {})[said] = None
    text = " and ".join(f"{machine}, commit {', '.join(of)}" for machine, of in commits.items())
    lines += ["", f"Medians on {text}; {place_of('gpu', '../')}"]
    return "\n".join(lines) + "\n"


def _of_a_copy(row: dict[str, Any], copy: dict[str, Any]) -> str:
    titles = {
        "reduction": "the mean of {inputs} arrays of 256 MiB, {dtype}, written over all of them",
        "flatten": "flatten {tensors:,} tensors of {elements:,} float32 into {flat}",
        "unflatten": "and back, {elements:,} elements each, from {flat}",
        "all_reduce": "all-reduce of 256 MiB by {world} ranks that are {mode}, {way}",
    }
    if row["what"] not in titles or row.get("inputs", _ARRAYS) != _ARRAYS:
        return ""
    way = _WAYS.get(row.get("meeting", ""), "") + _AWAITED[row.get("awaited", "each")]
    target = f"≥ {row['target_of_copy']:.2f}" if "target_of_copy" in row else ""
    rates = [f"{each['bytes_per_s'] * 1e-9:.0f} GB/s" for each in (row, copy)]
    return (
        f"| {titles[row['what']].format_map(row | {'way': way})} | {rates[0]} | a copy: {rates[1]}"
        f" | {row['of_copy']:.2f} | {target} |"
    )


def _of_torch(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    if "of_torch" not in row:
        return ""
    seconds = {other["contender"]: other["seconds"] for other in rows}
    alone = seconds.get("alone")
    best = min((name for name in seconds if name.startswith("torch")), key=seconds.__getitem__)
    is_shared = row["what"] == "shared step"
    ranks, library = "one rank over NCCL", "NCCL"
    if is_shared:
        ranks, library = "two processes on the GPU", "Gloo"
    elif "group" in row["contender"]:
        ranks = "one rank over torch's group of NCCL"
    beside = f"torch DDP over {library}: {time_text(seconds[best])}"
    beside += f" (without either {time_text(alone)})" if alone else ""
    ratio = f"{row['of_torch']:.2f}"
    if of := row.get("of_torch_estimate"):
        ratio += f" ({of['low']:.2f} to {of['high']:.2f})"
    return (
        f"| a step of {_MODELS[row['model']]}, {ranks} | {time_text(row['seconds'])} | {beside}"
        f" | {ratio} | ≤ {row['target_of_torch']:.2f} |"
    )
