"""The tables of collectives: what one takes, on one host and between hosts."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

from benchmarks.harness.figures import source, time_text
from dpcore.tools.sizes import size_text

CONTENDERS = ("dpcore arena", "dpcore plain", "Gloo", "Open MPI", "MPICH")
SIZES = (8, 32768, 1048576, 4194304, 16777216, 67108864, 268435456)


def table_of_all_reduce(records: list[dict[str, Any]], world: int = 2) -> str:
    """Medians of one all-reduce, a row a size, from the records of one run."""
    times = {
        (record["bytes"], record["contender"].lower()): record.get("median_s")
        for record in records
        if record["collective"] == "all_reduce" and record["world"] == world
    }
    lines = [
        "| float32, " + str(world) + " ranks | " + " | ".join(CONTENDERS) + " |",
        "|---:|" + "---:|" * len(CONTENDERS),
    ]
    for size in SIZES:
        row = [time_text(times.get((size, name.lower()))) for name in CONTENDERS]
        if any(cell != "–" for cell in row):
            lines.append(f"| {size_text(size)} | " + " | ".join(row) + " |")
    lines += ["", source("all_reduce", records)]
    return "\n".join(lines) + "\n"


def table_of_many_ranks(records: list[dict[str, Any]]) -> str:
    """An all-reduce where each rank has a core, beside Gloo and what memory allows."""
    contenders = (*CONTENDERS, "x *= 0.5")
    times = {(r["world"], r["bytes"], r["contender"]): r["median_s"] for r in records}
    lines = [
        f"| float32 | ranks | {' | '.join(CONTENDERS)} | `x *= 0.5` by every rank |",
        "|---:|---:|" + "---:|" * len(contenders),
    ]
    for world, size in dict.fromkeys((world, size) for world, size, _ in times):
        row = [time_text(times[world, size, name]) for name in contenders]
        lines.append(f"| {size_text(size)} | {world} | {' | '.join(row)} |")
    lines += ["", source("many_ranks", records, "../")]
    return "\n".join(lines) + "\n"


def table_of_collectives(records: list[dict[str, Any]]) -> str:
    what = "Medians of the rounds of a run, and of three runs"
    said = source("collectives", records, "../", what, lambda r: f"{r['world']} ranks")
    return speed_of_the_best(records, said)


def table_of_many_ranks_collectives(records: list[dict[str, Any]]) -> str:
    return speed_of_the_best(records, source("many_ranks_collectives", records, "../"))


def speed_of_the_best(records: list[dict[str, Any]], said: str) -> str:
    """How many times as fast as the best of the others, in the arena and with ordinary memory."""
    rows = sorted(
        dict.fromkeys((r["collective"], r["world"]) for r in records), key=lambda row: row[1]
    )
    ours = [r for r in records if r["role"] == "ours"]
    sizes = sorted(set(map(column_of, ours)))
    of_runs = defaultdict(list)
    for r in ours:
        if r.get("peer_ratio"):
            cell = r["collective"], r["world"], column_of(r), r["contender"]
            of_runs[cell].append(r["peer_ratio"])
    lines = ["| | ranks | " + " | ".join(size_text(size) for size in sizes) + " |"]
    lines += ["|---|---:|" + "---:|" * len(sizes)]
    for collective, world in rows:
        cells = []
        for size in sizes:
            pair = [of_runs[collective, world, size, name] for name in CONTENDERS[:2]]
            texts = [f"{statistics.median(ratios):.2f}" for ratios in pair if ratios]
            cells.append(" / ".join(texts) or "–")
        lines.append(f"| {collective} | {world} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", said]) + "\n"


def column_of(record: dict[str, Any]) -> int:
    """The smallest operation that gives each rank an element is one of "8 B", as a barrier is."""
    return 8 if record["bytes"] <= 4 * record["world"] else int(record["bytes"])


def table_of_network(records: list[dict[str, Any]]) -> str:
    """All-reduces over TCP, a row a link, number of ranks and size; raw TCP moves as many bytes,
    and "in place" from and to as much memory."""
    contenders = list(dict.fromkeys(record["contender"] for record in records))
    lines = ["| link | ranks | float32 | " + " | ".join(contenders) + " |"]
    lines += ["|---|---:|---:|" + "---:|" * len(contenders)]
    times = {
        (r["settings"]["link"], r["world"], r["bytes"], r["contender"]): r.get("median_s")
        for r in records
    }
    for link, world, size in dict.fromkeys(cell[:3] for cell in times):
        row = [time_text(times.get((link, world, size, contender))) for contender in contenders]
        lines.append(f"| {link} | {world} | {size_text(size)} | " + " | ".join(row) + " |")
    said = source("network", records, "../", part=lambda one: str(one["settings"]["link"]))
    return "\n".join([*lines, "", said]) + "\n"


def table_of_incast(records: list[dict[str, Any]]) -> str:
    """Steps over the bound, a row a network and size; the choice beside each algorithm."""
    algorithms = list(dict.fromkeys(record["algorithm"] for record in records))
    lines = ["| link | ranks | size | bound | " + " | ".join(f"`{a}`" for a in algorithms) + " |"]
    lines += ["|---|---:|---:|---:|" + "---:|" * len(algorithms)]
    rows: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for r in records:
        key = (r["question"], r["link"], r["world"], r["bytes"])
        rows.setdefault(key, {})[r["algorithm"]] = r
    for (question, link, world, size), cell in rows.items():
        ratios = " | ".join(
            f"{cell[name]['of_bound']:.3f}" if name in cell else "–" for name in algorithms
        )
        bound = next(iter(cell.values()))["bound_s"] * 1e3
        lines.append(
            f"| {question} {link} | {world} | {size_text(size)} | {bound:.0f} ms | {ratios} |"
        )
    used = [record for cell in rows.values() for record in cell.values()]
    load = max(record["load"] for record in used)
    lines += [
        "",
        source("incast", used, "../", part=lambda r: f"{r['question']} {r['link']}"),
        f"The load of the machine was up to {load:.0f}.",
    ]
    return "\n".join(lines) + "\n"


def table_of_priorities(records: list[dict[str, Any]]) -> str:
    """Milliseconds of an urgent all-reduce, a row a network and what is in flight."""
    lines = [
        "| link | ranks | in flight | urgent | alone | behind them | limit | without priority "
        "| bulk |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in records:
        times = [f"{r[name] * 1e3:.1f}" for name in ("alone_s", "behind_s", "limit_s", "patient_s")]
        lines.append(
            f"| {r['question']} {r['link']} | {r['world']} "
            f"| {r['bulk_operations']} × {size_text(r['bulk_bytes'])} "
            f"| {size_text(r['urgent_bytes'])} | {' | '.join(times)} | {r['bulk_ratio']:.2f} |"
        )
    said = f"Milliseconds; the load of the machine was up to {max(r['load'] for r in records):.0f}."
    lines += ["", source("priorities", records, "../"), said]
    return "\n".join(lines) + "\n"
