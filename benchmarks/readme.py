"""Writes the figures of README.md and of the documents from committed result files.

python -m benchmarks.readme            # says whether they are up to date
python -m benchmarks.readme --write    # and makes them so
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import backend_tables
from benchmarks.harness.beside_default import (
    DEFAULT,
    OURS,
    TORCH,
    best_of_torch,
    missed,
    newest,
)
from benchmarks.harness.figures import load, run_of, source, time_text
from benchmarks.harness.gpu_table import table_of_gpu
from benchmarks.harness.strategies_table import table_of_torch_parallel
from benchmarks.noise_cost import costs_of
from dpcore.commands.sizes import size_text
from dpcore.costs.link import parse_speed

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
TORCH_DISTRIBUTED = ROOT / "docs" / "torch_distributed.md"
BACKENDS = ROOT / "docs" / "backends.md"
GPU = ROOT / "docs" / "gpu.md"
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
CONTENDERS = ("dpcore arena", "dpcore plain", "Gloo", "Open MPI", "MPICH")
SIZES = (8, 32768, 1048576, 4194304, 16777216, 67108864, 268435456)
MODELS = {
    "mlp": "MLP, 42 M parameters",
    "transformer": "transformer, 4.7 M parameters",
    "many": "400 tensors of 256 B to 16 KiB",
    "gpt2": "GPT-2 shape, 124 M parameters",
}


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
    contenders = ("dpcore arena", "dpcore plain", "Gloo", "x *= 0.5")
    times = {(r["world"], r["bytes"], r["contender"]): r["median_s"] for r in records}
    lines = [
        "| float32 | ranks | dpcore arena | dpcore plain | Gloo | `x *= 0.5` by every rank |",
        "|---:|---:|" + "---:|" * len(contenders),
    ]
    for world, size in dict.fromkeys((world, size) for world, size, _ in times):
        row = [time_text(times[world, size, name]) for name in contenders]
        lines.append(f"| {size_text(size)} | {world} | {' | '.join(row)} |")
    lines += ["", source("many_ranks", records, "../")]
    return "\n".join(lines) + "\n"


def table_of_ddp_step(records: list[dict[str, Any]], world: int = 2) -> str:
    """What data parallel training adds to a step, a row a model."""
    lines = [
        f"| a step of {world} ranks | computing alone | torch DDP adds | dpcore adds | with "
        "`bucketed` | with `sequential` |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for model, title in MODELS.items():
        cell = {r["contender"]: r for r in records if (r["model"], r["world"]) == (model, world)}
        if not cell:
            continue
        torch = min((r for n, r in cell.items() if n.startswith("torch")), key=overhead)
        ours = [cell["dpcore"], cell["dpcore bucketed"], cell["dpcore sequential"]]
        added = [time_text(overhead(r)) if overhead(r) > 0 else "< 0" for r in (torch, *ours)]
        alone = time_text(cell["alone"]["step_s"])
        lines.append(f"| {title} | {alone} | {' | '.join(added)} |")
    lines += ["", source("ddp_step", records)]
    return "\n".join(lines) + "\n"


def overhead(record: dict[str, Any]) -> float:
    return float(record["overhead_s"])


def table_of_simulated(records: list[dict[str, Any]]) -> str:
    """Predicted and measured steps, a row a link and schedule."""
    lines = [
        "| link | schedule | predicted | measured | ratio |",
        "|---|---|---:|---:|---:|",
    ]
    for record in records:
        predicted, measured = record["predicted_ms"], record["measured_ms"]
        lines.append(
            f"| {record['link']} | `{record['schedule']}` | {predicted:.1f} ms | "
            f"{measured:.1f} ms | {measured / predicted:.2f} |"
        )
    lines += ["", source("simulated", records, "../")]
    return "\n".join(lines) + "\n"


def table_of_shaped_link(records: list[dict[str, Any]]) -> str:
    """Steps over real links, a row a contender; in brackets the ratio to the bound of the rate."""
    rates = list(dict.fromkeys(record["rate"] for record in records))
    cells = {(record["rate"], record["contender"]): record for record in records}
    bounds = [cells[rate, "alone"]["bound_s"] for rate in rates]
    lines = ["| | " + " | ".join(rates) + " |", "|---|" + "---:|" * len(rates)]
    lines.append("| bound | " + " | ".join(f"{bound * 1e3:.0f} ms" for bound in bounds) + " |")
    for contender in dict.fromkeys(record["contender"] for record in records):
        row = [cells.get((rate, contender)) for rate in rates]
        texts = [
            f"{cell['step_s'] * 1e3:.0f} ms ({cell['of_bound']:.2f})" if cell else "–"
            for cell in row
        ]
        lines.append(f"| {contender} | " + " | ".join(texts) + " |")
    lines += ["", source("shaped_link", cells.values(), "../", part=lambda r: str(r["rate"]))]
    return "\n".join(lines) + "\n"


def table_of_across_steps(records: list[dict[str, Any]]) -> str:
    """Whole steps, a row a contender; in brackets the ratios to the bound and to bucketed."""
    newest = {(r["place"], r["model"]): r for r in records if r["contender"] == "dpcore oracle"}
    rates = {place: parse_speed(place).bytes_per_second for place, _ in newest if place != "host"}
    columns = sorted(newest, key=lambda column: (rates.get(column[0], math.inf), column[1]))
    oracles = [newest[column] for column in columns]
    cells = {
        (*column, r["contender"]): r  # of the run of the column's oracle
        for r in records
        if (column := (r["place"], r["model"])) in newest and run_of(r) == run_of(newest[column])
    }
    lines = ["| | " + " | ".join(f"{place}, {model}" for place, model in columns) + " | state |"]
    lines += ["|---|" + "---:|" * (len(columns) + 1)]
    lines.append("| bound | " + " | ".join(time_text(r["bound_s"]) for r in oracles) + " | |")
    contenders = dict.fromkeys(contender for *_, contender in cells)
    for contender in sorted(contenders, key=lambda name: name.split()[0]):
        row = [cells.get((*column, contender)) for column in columns]
        texts = [f"{text_across_steps(r)} | " if r else "– | " for r in row]
        shares = [r["state_bytes"] / oracle["state_bytes"]
                  for r, oracle in zip(row, oracles, strict=True) if r]  # fmt: skip
        lines.append(f"| {contender} | {''.join(texts)}{max(shares):.2f} |")
    used = source("across_steps", oracles, "../", part=lambda r: f"{r['place']} {r['model']}")
    lines += ["", used]
    return "\n".join(lines) + "\n"


def text_across_steps(record: dict[str, Any]) -> str:
    ratios = f"{record['of_bound']:.2f}"
    if "of_bucketed" in record:
        ratios += f"; {record['of_bucketed']['median']:.2f}"
    return f"{time_text(record['step_s'])} ({ratios})"


def table_of_network(records: list[dict[str, Any]]) -> str:
    """All-reduces over TCP, a row a link and size; raw TCP moves as many bytes."""
    contenders = list(dict.fromkeys(record["contender"] for record in records))
    lines = ["| link | float32, 2 ranks | " + " | ".join(contenders) + " |"]
    lines += ["|---|---:|" + "---:|" * len(contenders)]
    times = {
        (r["settings"]["link"], r["bytes"], r["contender"]): r.get("median_s") for r in records
    }
    for link, size in dict.fromkeys((link, size) for link, size, _ in times):
        row = [time_text(times.get((link, size, contender))) for contender in contenders]
        lines.append(f"| {link} | {size_text(size)} | " + " | ".join(row) + " |")
    lines += ["", source("network", records, "../", "Medians of two runs, loopback and links,")]
    return "\n".join(lines) + "\n"


def table_of_memory(records: list[dict[str, Any]]) -> str:
    """The most that all ranks held, a row a model."""
    contenders = list(dict.fromkeys(record["contender"] for record in records))
    lines = ["| MiB, 2 ranks | " + " | ".join(contenders) + " |"]
    lines += ["|---|" + "---:|" * len(contenders)]
    peaks = {(r["model"], r["contender"]): r["peak_bytes"] / (1 << 20) for r in records}
    for model in dict.fromkeys(model for model, _ in peaks):
        found = (peaks.get((model, contender)) for contender in contenders)
        row = ["–" if peak is None else f"{peak:.1f}" for peak in found]
        lines.append(f"| {MODELS[model]} | " + " | ".join(row) + " |")
    lines += ["", source("memory", records, "../", "One training each")]
    return "\n".join(lines) + "\n"


def table_of_noise_cost(records: list[dict[str, Any]]) -> str:
    """What measuring the gradient noise scale adds to a step, a row a model."""
    newest = {record["model"]: record for record in records}
    names = list(records[-1]["costs"])
    heads = ["without", *names, "two reads alone"]
    lines = ["| a step of 2 ranks | " + " | ".join(heads) + " |"]
    lines += ["|---|" + "---:|" * len(heads)]
    for model, kept in newest.items():
        record = costs_of(kept["ranks"], model)
        costs = (record["costs"][name] for name in names)
        cells = [f"{of['median']:.1%} ({of['low']:.1%} to {of['high']:.1%})" for of in costs]
        row = " | ".join([*cells, f"{record['bound']:.1%}"]).replace("%", " %")
        lines.append(f"| {MODELS[model]} | {time_text(record['step_s'])} | {row} |")
    lines += ["", source("noise_cost", newest.values(), "../", part=lambda r: str(r["model"]))]
    return "\n".join(lines) + "\n"


def table_of_collectives(records: list[dict[str, Any]]) -> str:
    """How many times as fast as the best of the others, in the arena and with ordinary memory."""
    # With four ranks the smallest operation that gives each of them an element has 16 bytes.
    sizes = sorted({max(r["bytes"], 8) for r in records if r["world"] == 2 and r["bytes"] != 16})
    rows = dict.fromkeys((r["collective"], r["world"]) for r in records)
    ratios = {
        (r["collective"], r["world"], 8 if r["bytes"] <= 16 else r["bytes"], r["contender"]): r
        for r in records
        if r["role"] == "ours"
    }
    lines = ["| | ranks | " + " | ".join(size_text(size) for size in sizes) + " |"]
    lines += ["|---|---:|" + "---:|" * len(sizes)]
    for collective, world in rows:
        cells = []
        for size in sizes:
            pair = [ratios.get((collective, world, size, name)) for name in CONTENDERS[:2]]
            texts = [f"{r['peer_ratio']:.2f}" for r in pair if r and r.get("peer_ratio")]
            cells.append(" / ".join(texts) or "–")
        lines.append(f"| {collective} | {world} | " + " | ".join(cells) + " |")
    lines += ["", source("collectives", records, "../", "Medians of two runs")]
    return "\n".join(lines) + "\n"


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


def table_of_defaults(records: list[dict[str, Any]]) -> str:
    """Ratios default / contender and the upper ends of their intervals, a row a cell; misses are
    bold."""
    shown = (*OURS, TORCH)
    heads = [f"`{name.removeprefix('dpcore ').removeprefix('bucketed ')}`" for name in shown]
    lines = ["| | default | " + " | ".join(heads) + " | best of torch |"]
    lines += ["|---|---:|" + "---:|" * (len(heads) + 1)]
    for name, cell in newest(records).items():
        texts = ["–" if one not in cell else ratio_text(cell[one]) for one in shown]
        best = best_of_torch(cell)
        texts.append("–" if best is None else f"{ratio_text(best)} {best['contender']}")
        lines.append(f"| {name} | {cell[DEFAULT]['step_s'] * 1e3:.1f} ms | {' | '.join(texts)} |")
    used = [record for cell in newest(records).values() for record in cell.values()]
    what = "Intervals of 95%, of runs"
    lines += ["", source("defaults", used, "../", what, lambda r: str(r["cell"]))]
    return "\n".join(lines) + "\n"


def ratio_text(record: dict[str, Any]) -> str:
    high = f"{record['ratio']['high']:.2f}"
    return f"{record['ratio']['median']:.2f} ({f'**{high}**' if missed(record) else high})"


def table_of_neighbours(records: list[dict[str, Any]]) -> str:
    """Times quiet and loaded, and ratios with their intervals, a row an operation of ours."""
    lines = [
        "| | quiet | loaded | quiet, of Gloo's | loaded, of Gloo's | of the fair share |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    ours = {r["what"]: r for r in records if r["contender"] == "dpcore"}  # the last of each
    for r in ours.values():
        ratios = [r[name] for name in ("quiet_of_gloo", "loaded_of_gloo", "of_fair_share")]
        texts = [f"{x['median']:.2f} ({x['low']:.2f} to {x['high']:.2f})" for x in ratios]
        times = [time_text(r[name]) for name in ("quiet_s", "loaded_s")]
        lines.append(f"| {r['what']} | {' | '.join((*times, *texts))} |")
    lines += ["", source("neighbours", ours.values(), "../", part=lambda r: str(r["what"]))]
    return "\n".join(lines) + "\n"


def table_of_local_updates(records: list[dict[str, Any]]) -> str:
    """Losses with their intervals, a row a contender."""
    reference = records[-1]["reference"]
    lines = [
        f"| | MB sent | seconds | loss after all tokens | within the bytes of {reference} "
        f"| within its seconds |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    rows = {record["contender"]: record for record in records}.values()  # the last of each
    for r in rows:
        losses = [r[name] for name in ("loss", "loss_of_bytes", "loss_of_seconds")]
        texts = [f"{x['mean']:.3f} ({x['low']:.2f} to {x['high']:.2f})" for x in losses]
        sent = f"{r['bytes'] / 1e6:.1f} | {r['seconds']:.1f}"
        lines.append(f"| {r['contender']} | {sent} | {' | '.join(texts)} |")
    settings = records[-1]["settings"]
    what = f"Means of {settings['seeds']} trainings, with intervals of 95%, over an emulated link"
    what += f" ({settings['link']}),"
    lines += ["", source("local_updates", rows, "../", what, lambda r: str(r["contender"]))]
    return "\n".join(lines) + "\n"


TABLES = {"all_reduce": table_of_all_reduce, "ddp_step": table_of_ddp_step}  # of README.md
MORE_TABLES = {  # of docs/performance.md
    "many_ranks": table_of_many_ranks,
    "collectives": table_of_collectives,
    "simulated": table_of_simulated,
    "shaped_link": table_of_shaped_link,
    "across_steps": table_of_across_steps,
    "network": table_of_network,
    "memory": table_of_memory,
    "incast": table_of_incast,
    "priorities": table_of_priorities,
    "defaults": table_of_defaults,
    "local_updates": table_of_local_updates,
    "neighbours": table_of_neighbours,
    "noise_cost": table_of_noise_cost,
}
TABLES_OF_TORCH = {"torch_parallel": table_of_torch_parallel}  # of docs/torch_distributed.md
TABLES_OF_BACKENDS = {"backends": backend_tables.tables}  # of docs/backends.md
TABLES_OF_GPUS = {"gpu": table_of_gpu}  # of docs/gpu.md
EVERY_TABLE = TABLES | MORE_TABLES | TABLES_OF_TORCH | TABLES_OF_BACKENDS | TABLES_OF_GPUS


def rendered(document: str) -> str:
    def block(match: re.Match[str]) -> str:
        name = match.group(2)
        return match.group(1) + EVERY_TABLE[name](load(name)) + match.group(3)

    return BLOCK.sub(block, document)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help="change them")
    arguments = parser.parse_args()
    stale = 0
    for path in (README, PERFORMANCE, TORCH_DISTRIBUTED, BACKENDS, GPU):
        old = path.read_text(encoding="utf-8")
        new = rendered(old)
        if arguments.write:
            path.write_text(new, encoding="utf-8")
        elif new != old:
            print(f"{path.name} is not up to date; run: python -m benchmarks.readme --write")
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
