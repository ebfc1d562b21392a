"""Which plans of public repositories are read, proved and run?

    python -m benchmarks.plans "Azure/msccl-scheduler at a0bfca14=FOLDER" "OTHER=FOLDER" ...

FOLDER is a checkout, or has what a repository's programs print. Every MSCCLang XML and every JSON
plan of mscclpp in it is read and proved. A plan that is proved runs on as many ranks as it is for,
which are threads of this machine, and what they end with is compared with the sum, the gather or
the exchange that numpy makes. The files themselves stay where they are; the record has their names
and digests.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import dpcore as dp
from benchmarks.harness.options import script_parser
from dpcore.reference import plans
from dpcore.tools.records import ROOT, keep, run_facts

RESULTS = ROOT / "benchmarks/results/plans.jsonl"
PROVED, REFUTED, OTHER, UNREAD = "proved", "refuted", "another collective", "not read"
_OTHER = re.compile(r"the collective '.*' is not one of")
_EACH = 6  # elements of a chunk


def ran(comm: Any, path: str, collective: str, chunks: int) -> bool:
    """On a rank: whether what it ends with is right."""
    world, rank = comm.world_size, comm.rank
    part = chunks * _EACH
    inputs = [np.arange(float(part * world)) * (one + 1) for one in range(world)]
    mine, out = inputs[rank], np.zeros(part * world)
    total = np.sum(inputs, 0)
    cut = slice(rank * part, (rank + 1) * part)
    if collective == "all_reduce":
        comm.all_reduce(mine, algorithm=path)
        return bool(np.array_equal(mine, total))
    if collective == "reduce_scatter":
        out = out[:part]
        comm.reduce_scatter(out, mine, algorithm=path)
        return bool(np.array_equal(out, total[cut]))
    if collective == "all_gather":
        comm.all_gather(out, mine[:part], algorithm=path)
        return bool(np.array_equal(out, np.concatenate([one[:part] for one in inputs])))
    comm.all_to_all(out, mine, algorithm=path)
    return bool(np.array_equal(out, np.concatenate([one[cut] for one in inputs])))


def judged(path: Path) -> dict[str, Any]:
    """What becomes of a plan; ``says``: why it goes no further."""
    found: dict[str, Any] = {"result": UNREAD, "ran": False, "says": ""}
    try:
        plan = plans.read(path)
        found |= {"collective": plan.collective, "world": plan.world, "result": REFUTED}
        versions = plans.prove(plan)
        found["result"] = PROVED
        schedule = plans.schedule_of(plan, versions)
        args = str(path), plan.collective, schedule.chunks
        found["ran"] = all(dp.spawn(ran, plan.world, *args, mode="threads"))
        if not found["ran"]:
            found["says"] = "ranks ended with other numbers"
    except plans.PlanError as problem:
        found["says"] = str(problem).removeprefix(f"{path}, ")
        if _OTHER.search(found["says"]):
            found["result"] = OTHER
    return found


def records_of(origin: str, folder: Path) -> list[dict[str, Any]]:
    lines = []
    for path in sorted(one for one in folder.rglob("*") if one.suffix in (".xml", ".json")):
        content = path.read_bytes()
        is_one = b"<algo" in content[:4096] if path.suffix == ".xml" else plans.is_plan(path)
        if is_one:
            name, digest = str(path.relative_to(folder)), hashlib.sha256(content).hexdigest()
            lines.append({"from": origin, "file": name, "sha256": digest[:16]} | judged(path))
            one = lines[-1]
            said = f" ({one['says']})" if one["says"] else ""
            print(f"{origin}, {name}: {one['result']}{', ran' * one['ran']}{said}", flush=True)
    return lines


def table_of_plans(records: Sequence[dict[str, Any]]) -> str:
    """A row for each origin, and each refutation in its own words."""
    origins = dict.fromkeys(record["from"] for record in records)
    lines = ["| from | read | proved | refuted | run |", "|---|---:|---:|---:|---:|"]

    def row(name: str, of: Sequence[dict[str, Any]]) -> str:
        proved = [one for one in of if one["result"] == PROVED]
        refuted = [one for one in of if one["result"] == REFUTED]
        run = sum(one["ran"] for one in proved)
        counts = len(proved) + len(refuted), len(proved), len(refuted), run
        return f"| {name} | {' | '.join(map(str, counts))} |"

    lines += [row(name, [one for one in records if one["from"] == name]) for name in origins]
    lines += [row("all", records), ""]
    other = sum(one["result"] == OTHER for one in records)
    unread = [one for one in records if one["result"] == UNREAD]
    if other:
        lines.append(f"{other} more are for collectives that dpcore does not have.")
    if unread:
        lines.append(f"{len(unread)} could not be read: {_named(unread)}.")
    lines += ["", "Refuted, each with its place:", ""]
    lines += [
        f"* `{one['file']}` ({one['from'].partition(' at ')[0]}): {one['says']}"
        for one in records
        if one["result"] == REFUTED
    ]
    first = records[0]
    lines += [
        "",
        f"Tried on {first['date'][:10]} by dpcore at commit {first['commit'][:10]}; the record of "
        "every file is in [`benchmarks/results/plans.jsonl`](../benchmarks/results/plans.jsonl).",
    ]
    return "\n".join(lines) + "\n"


def _named(records: Sequence[dict[str, Any]]) -> str:
    return "; ".join(f"`{one['file']}`, {one['says']}" for one in records)


def main() -> int:
    made = script_parser(__doc__)
    made.add_argument("origins", nargs="+", metavar="WHERE=FOLDER")
    made.add_argument("--records", type=Path, default=RESULTS, metavar="FILE")
    options = made.parse_args()
    lines = []
    for given in options.origins:
        origin, _, folder = given.rpartition("=")
        if not origin or not Path(folder).is_dir():
            made.error(f"{given!r}: write where plans are from and a folder, as WHERE=FOLDER")
        lines += records_of(origin, Path(folder))
    facts = run_facts({}, {})
    facts["command"] = "python -m benchmarks.plans WHERE=FOLDER ..."  # paths of this machine
    options.records.unlink(missing_ok=True)
    keep(options.records, facts, lines)
    print(table_of_plans([facts | line for line in lines]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
