"""The tables of documents name the runs that they show, and hold where something is missing."""

from benchmarks import links
from benchmarks.harness import collective_tables, step_tables
from benchmarks.harness.gpu_table import table_of_gpu


def record(day="2026-11-22", commit="a" * 12, **more):
    machine = {"cores": 2, "cpu": "CPU"}
    return {"date": day, "commit": commit, "machine": machine, "load": 1.0, **more}


def incast(link, algorithm, **more):
    cell = {"question": "shaped", "link": link, "world": 4, "bytes": 1 << 20}
    return record(algorithm=algorithm, bound_s=0.1, of_bound=1.5, **cell, **more)


def test_rows_of_two_runs_name_both():
    old = [incast("1gbit", "auto", load=9.0), incast("100mbit", "auto", load=2.0)]
    new = incast("1gbit", "auto", commit="b" * 12)
    said = collective_tables.table_of_incast([*old, new])
    assert "shaped 100mbit on 2 cores of an CPU (2026-11-22, commit aaaaaaaaaa)" in said
    assert "shaped 1gbit on 2 cores of an CPU (2026-11-22, commit bbbbbbbbbb)" in said
    assert "up to 2." in said  # the load of 9 was in a run that is not shown
    assert "Medians of one run on 2 cores" in collective_tables.table_of_incast([new])


def test_an_algorithm_that_was_left_out_has_a_dash():
    said = collective_tables.table_of_incast([incast("1gbit", "auto"), incast("100mbit", "ring")])
    assert "| 1.500 | – |" in said
    assert "| – | 1.500 |" in said


def across(contender, **more):
    figures = {"bound_s": 0.1, "step_s": 0.2, "of_bound": 2.0, "state_bytes": 8}
    return record(place="host", model="mlp", contender=contender, **figures, **more)


def test_a_column_shows_the_run_of_its_oracle_only():
    records = [across("torch 1", commit="b" * 12), across("dpcore oracle"), across("torch 4")]
    records.append(across("torch 4", commit="c" * 12))
    said = step_tables.table_of_across_steps(records)
    assert "torch 1" not in said
    assert "| torch 4 | 200.0 ms (2.00) | 1.00 |" in said
    assert said.count("commit") == 1


def test_contenders_that_failed_or_are_absent_have_a_dash():
    shaped = {"step_s": 0.1, "of_bound": 1.0, "bound_s": 0.1}
    records = [record(rate=rate, contender="alone", **shaped) for rate in ("1gbit", "10gbit")]
    records.append(record(rate="1gbit", contender="torch", **shaped))
    assert "| torch | 100 ms (1.00) | – |" in step_tables.table_of_shaped_link(records)
    cell = {"world": 2, "bytes": 8, "collective": "all_reduce", "role": "ours"}
    failed = record(contender="dpcore plain", missing="it died", rounds_s=[], **cell)
    assert "| all_reduce | 2 | – |" in collective_tables.table_of_collectives([failed])
    links_ = [
        record(settings={"link": "lo"}, contender="a", **{**cell, "bytes": 8}, median_s=1.0),
        record(settings={"link": "lo"}, contender="b", **{**cell, "bytes": 64}, median_s=1.0),
    ]
    assert "| lo | 2 | 8 B | 1000.0 ms | – |" in collective_tables.table_of_network(links_)
    peaks = [
        record(model=model, contender=who, peak_bytes=1 << 20)
        for model, who in (("mlp", "a"), ("mlp", "b"), ("many", "a"))
    ]
    assert "| 1.0 | – |" in step_tables.table_of_memory(peaks)


def test_links_keeps_every_round_and_changes_the_order():
    called = []

    def call(name):
        return lambda: called.append(name) or [float(len(called))]

    taken = links.in_turns([call("ours"), call("raw")], rounds=2)
    assert [len(rounds) for (rounds,) in taken] == [2, 2]
    assert called != ["ours", "raw"] * 3
    found = links.row("filling", "1gbit", 8, [0.1, 0.2, 0.3], [0.1, 0.1, 0.1])
    assert (found.ratio, found.here_ms, found.here_rounds_s) == (0.5, 200.0, [0.1, 0.2, 0.3])


def test_of_a_gpu_the_newest_rows_of_each_section_are_shown():
    machine = {"gpu": "GPU", "driver_release": "5.1", "torch_cuda": "13.0", "torch": "2.11"}
    machine["nccl"] = {"version": "2.28"}

    def run(commit, *rows):
        return record(commit=commit, results=list(rows), **machine)

    def reduced(of_copy, inputs=8):
        row = {"what": "reduction", "dtype": "float32", "inputs": inputs, "bytes_per_s": 4e9}
        return row | {"section": "reduction float32", "of_copy": of_copy}

    def stepped(contender, seconds, **more):
        return {
            "what": "step",
            "section": "step",
            "contender": contender,
            "seconds": seconds,
        } | more

    copy = {"what": "copy", "section": "copy", "bytes_per_s": 8e9, "of_copy": 1.0}
    ours = stepped("dpcore", 2e-3, of_torch=0.5, target_of_torch=0.95, model="400-tensors")
    sure = ours | {"of_torch_estimate": {"median": 0.5, "low": 0.375, "high": 0.625}}
    peers = [stepped("alone", 1e-3), stepped("torch", 5e-3), stepped("torch, views", 4e-3)]
    old = run("b" * 12, copy, reduced(0.25), ours, *peers)
    said = table_of_gpu([old, run("c" * 12, copy, reduced(0.5), reduced(0.125, inputs=2))])
    assert "| 4 GB/s | a copy: 8 GB/s | 0.50 |  |" in said
    assert "0.25" not in said and "0.12" not in said
    assert (
        "| 2.00 ms | torch DDP over NCCL: 4.00 ms (without either 1.00 ms) | 0.50 | ≤ 0.95 |"
        in said
    )
    said_sure = table_of_gpu([run("b" * 12, copy, sure, *peers)])
    assert "| 0.50 (0.38 to 0.62) | ≤ 0.95 |" in said_sure
    assert "one GPU (driver 5.1, CUDA 13.0, NCCL 2.28, torch 2.11), commit cccccccccc on" in said
    assert "bbbbbbbbbb on 2026-11-22" in said
