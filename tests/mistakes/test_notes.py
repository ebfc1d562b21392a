"""Notes about mistakes reach their readers: the report of buckets and the monitor's line."""

import torch
from torch import nn

import dpcore


def test_the_report_of_buckets_ends_with_them():
    def body(comm):
        model = dpcore.DataParallel(nn.Linear(2, 1), comm=comm)
        assert "note" not in repr(model.bucket_report())
        model._mistakes.note("a kind", "batches are <equal>")
        report = model.bucket_report()
        assert report.notes == ["batches are <equal>"]
        assert repr(report).endswith("\nnote: batches are <equal>")
        assert "note: batches are &lt;equal&gt;" in report._repr_html_()

    dpcore.spawn(body, 1, mode="threads")


def test_the_monitor_tells_each_of_them_once(capsys):
    def body(comm):
        model = dpcore.DataParallel(nn.Linear(2, 1), comm=comm)
        with dpcore.monitor(model) as monitor:
            for number in range(3):
                model(torch.ones(1, 2)).sum().backward()
                if number < 2:
                    model._mistakes.note(f"kind {number}", f"note {number} of rank {comm.rank}")
                    model._mistakes.note(f"kind {number} too", "and another")
                found = monitor.figures()["notes"]
                assert found == (
                    [f"note {number} of rank {comm.rank}", "and another"] * (number < 2)
                )

    dpcore.spawn(body, 2, mode="threads")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("; note: ")[2] for line in lines] == [
        "note 0 of rank 0; note: and another",
        "note 1 of rank 0; note: and another",
        "",
    ]
