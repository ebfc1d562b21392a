"""The tables of `python -m benchmarks.backends`."""

from benchmarks.backends import WITHOUT, markdown
from dpcore.tools.compare.collectives.cells import Cell
from dpcore.tools.compare.collectives.contenders import ARENA, peer
from dpcore.tools.compare.collectives.loop import Measurement


def test_a_row_per_size_and_backend():
    cell = Cell("all_reduce", 1 << 20, 4)
    ours = Measurement(cell, ARENA, rounds=[n * 1e-4 for n in (9, 11, 10, 12, 8, 10, 10, 30, 9)])
    gloo = Measurement(cell, peer("gloo"), rounds=[2e-3] * 9)
    missing = Measurement(cell, peer("mpich"), missing="not installed")
    title, _, head, _, first, second, third, _, last = markdown([[ours, gloo, missing]])
    assert title == "### all_reduce, 4 ranks"
    assert "| time, us (95%) |" in head
    assert head.count("|") == first.count("|") == second.count("|") == third.count("|") == 6
    # The second and the eighth of nine hold the median between them.
    assert "| 1 MiB | dpcore, in its arena | **1000.0 (900.0 to 1200.0)** | 1.049 " in first
    assert "(0.874 to 1.165) | 1.573 (1.311 to 1.748) |" in first
    assert "| 1 MiB | Gloo | 2000.0 (2000.0 to 2000.0) | 0.524 " in second
    assert "n/a: not installed" in third
    assert last == f"Without {WITHOUT}."


def test_the_middle_of_an_even_number_of_rounds_is_between_two():
    ours = Measurement(Cell("all_reduce", 1 << 20, 2), ARENA, rounds=[1e-3, 3e-3])
    _, _, head, _, row, *_ = markdown([[ours]])
    assert "| time, us (range of 2 rounds) |" in head
    assert f"| {(1 << 20) / 2e-3 / 1e9:.3f} (" in row
