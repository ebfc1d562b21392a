"""`--grid`: what it takes, what it draws of rounds that are made up, and a small run."""

import json

import pytest

from dpcore.__main__ import main
from dpcore.tools.compare.figures import figures_of
from dpcore.tools.compare.grid import best_of, bound_ms, grid, write_grid
from dpcore.tools.compare.output import Outcome
from dpcore.tools.compare.plan import Cell, contenders
from tests.command_line import status_of
from tests.compare.test_command import OWN, SHORT
from tests.compare.test_figures import rounds

ENTRANTS = contenders(["torch:1", "torch:25", "bucketed:1", "bucketed:25", "local_sgd:4"])


def outcome(link, world):
    made = rounds(lambda n: 110.0 + n % 3, lambda n: 104.0 + n % 3)
    for one in made:
        for of in one.values():
            for entrant in ENTRANTS:
                of[entrant.inner] = of["torch" if entrant.is_torch else "dpcore"]
    kind = "emulated" if link else "machine"
    return Outcome(Cell(link, kind, world), figures_of(ENTRANTS, made), [])


def test_every_combination():
    made = grid("none,1gbit,50us x 2,4 x torch,mine.py:MySchedule,hook:fp16 x 1,0.5")
    assert (made.links, made.worlds) == (["", "1gbit,50us"], [2, 4])
    assert made.contenders == ["torch:1", "torch:0.5", "mine.py:MySchedule", "hook:fp16"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--grid", "none x 2 x torch"], "--grid: 'none x 2 x torch' has 3 lists; write links"),
        (["--grid", "none x 2 x torch x big"], "'big' is not a size in MiB"),
        (["--grid", "none x 2 x torch x 1", "--world", "4"], "--world: --grid names links"),
        (["--grid", "none x 2 x torch,torch x 1"], "is named twice"),
    ],
)
def test_mistakes(capsys, arguments, said):
    assert status_of("compare", *arguments) == 2
    assert said in capsys.readouterr().err


def test_the_plot_has_a_panel_for_each_link_and_world_with_its_bound(tmp_path, monkeypatch):
    outcomes = [outcome(link, world) for link in ("", "1gbit") for world in (2, 4)]
    drawn = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, to: drawn.append((figure, to))
    )
    assert write_grid(tmp_path / "grid.png", "mlp", outcomes)
    assert [to.name for _, to in drawn] == ["grid.png", "grid.svg"]
    panels = drawn[0][0].axes
    assert [axes.get_title(loc="left") for axes in panels] == [
        "2 ranks, this machine", "4 ranks, this machine", "2 ranks, 1gbit", "4 ranks, 1gbit",
    ]  # fmt: skip
    _, labels = panels[0].get_legend_handles_labels()
    assert set(labels) == {"torch", "bucketed", "local_sgd:4", "bound of any overlap"}
    assert bound_ms(outcomes[0]) == pytest.approx(100.0)
    assert "bucketed:1 has the shortest step, 105 ms, 1.05 of the bound" in best_of(outcomes[0])


def test_a_small_grid(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(OWN)
    wanted = ["--emulated", "--grid", "none,1gbit x 2 x torch,bucketed x 1,25"]
    assert main(["compare", "my.py:make", *wanted, *SHORT]) == 0
    assert "the grid" in capsys.readouterr().out
    kept = tmp_path / "compare/my-make"
    assert all((kept / name).is_file() for name in ("grid.png", "grid.svg", "compare.svg"))
    lines = [json.loads(line) for line in (kept / "compare.jsonl").open()]
    assert len(lines) == 8 and all(len(line["rounds_ms"]) == 2 for line in lines)
