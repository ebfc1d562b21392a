"""The tables of training: what communication adds to a step, in time and in memory."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.harness.beside_default import (
    DEFAULT,
    OURS,
    TORCH,
    best_of_torch,
    missed,
    newest,
    used_in,
)
from benchmarks.harness.figures import ends, run_of, source, time_text
from benchmarks.noise_cost import costs_of
from dpcore.base.link import parse_speed

MODELS = {
    "mlp": "MLP, 42 M parameters in matrices of 64 MiB",
    "ten": "ten matrices of 16 MiB",
    "transformer": "transformer, 4.7 M parameters",
    "many": "400 tensors of 256 B to 16 KiB",
    "gpt2": "GPT-2 shape, 124 M parameters",
}


def table_of_ddp_step(records: list[dict[str, Any]]) -> str:
    return what_a_step_pays(records, 2, source("ddp_step", records, "../"))


def table_of_many_ranks_step(records: list[dict[str, Any]]) -> str:
    return what_a_step_pays(records, 8, source("many_ranks_step", records, "../"))


def what_a_step_pays(records: list[dict[str, Any]], world: int, said: str) -> str:
    """A step with and without data parallel training, a row a model."""
    lines = [
        f"| a step of {world} ranks | computing alone | with warm memory | torch DDP | dpcore "
        "(of alone; of torch) | `bucketed` | `sequential` | `copied` |",
        "|---|" + "---:|" * 7,
    ]
    for model, title in MODELS.items():
        cell = {r["contender"]: r for r in records if (r["model"], r["world"]) == (model, world)}
        if not cell:
            continue
        steps = {name: float(record["step_s"]) for name, record in cell.items()}
        torch = min(step for name, step in steps.items() if name.startswith("torch"))
        ours, alone = steps["dpcore"], steps["alone"]
        shown = [
            steps.get("alone warm"), torch, None, steps["dpcore bucketed"],
            steps["dpcore sequential"], steps.get("dpcore copied"),
        ]  # fmt: skip
        texts = ["–" if step is None else time_text(step) for step in shown]
        texts[2] = f"{time_text(ours)} ({ours / alone:.2f}; {ours / torch:.2f})"
        lines.append(f"| {title} | {time_text(alone)} | {' | '.join(texts)} |")
    return "\n".join([*lines, "", said]) + "\n"


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


def table_of_slices(records: list[dict[str, Any]]) -> str:
    """The schedules of examples/slices.py beside those that send whole buckets."""
    return table_of_across_steps(records, "slices")


def table_of_across_steps(records: list[dict[str, Any]], name: str = "across_steps") -> str:
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
    for contender in sorted(contenders, key=lambda one: one.split()[0]):
        row = [cells.get((*column, contender)) for column in columns]
        texts = [f"{text_across_steps(r)} | " if r else "– | " for r in row]
        shares = [r["state_bytes"] / oracle["state_bytes"]
                  for r, oracle in zip(row, oracles, strict=True) if r]  # fmt: skip
        lines.append(f"| {contender} | {''.join(texts)}{max(shares):.2f} |")
    used = source(name, oracles, "../", part=lambda r: f"{r['place']} {r['model']}")
    lines += ["", used]
    return "\n".join(lines) + "\n"


def text_across_steps(record: dict[str, Any]) -> str:
    ratios = f"{record['of_bound']:.2f}"
    if "of_bucketed" in record:
        ratios += f"; {record['of_bucketed']['median']:.2f}"
    return f"{time_text(record['step_s'])} ({ratios})"


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


def table_of_defaults(records: list[dict[str, Any]]) -> str:
    return beside_the_default(records, "defaults")


def table_of_many_ranks_defaults(records: list[dict[str, Any]]) -> str:
    return beside_the_default(records, "many_ranks_defaults")


def beside_the_default(records: list[dict[str, Any]], file: str) -> str:
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
    used = used_in(records)
    what = f"In brackets the upper end ({ends(used)}); runs"
    lines += ["", source(file, used, "../", what, lambda r: str(r["cell"]))]
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
