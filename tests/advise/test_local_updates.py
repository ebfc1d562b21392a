"""Traces of LocalSGD and DiLoCo with a planted cause, and with none."""

import pytest

from dpcore.__main__ import main
from dpcore.tools.advise.advice import advice_on
from dpcore.tools.show.reading import read_run
from tests.simulate.local_runs import written


def advice_of(tmp_path, **planted):
    path = written(tmp_path / "run.json", **{"intervals": 6, "outer": 0} | planted)
    return advice_on(read_run(path), [path])


@pytest.mark.parametrize(
    ("planted", "change"),
    [
        ({"wire": 20}, "sync_every=4, fragment_sync_delay=2); or sync_every=16; or dp.DiLoCo"),
        ({"wire": 160}, "sync_every=16; or dp.DiLoCo(module, optimizer, outer, sync_every=4, bits"),
        ({"wire": 20, "sync_every": 1}, "sync_every=4; or"),
        ({"wire": 160, "sync_every": 32, "fragments": 2, "delay": 1, "bits": 8},
         "sync_every=32, fragments=2, fragment_sync_delay=8, bits=8); or sync_every=128. Each"),
    ],
    ids=str,
)  # fmt: skip
def test_ranks_that_wait_for_what_they_send(tmp_path, planted, change):
    advice = advice_of(tmp_path, **planted)
    assert [finding.cause for finding in advice.findings] == ["exposed sends"]
    (finding,) = advice.wrong
    assert change in finding.change and finding.basis == "bound"
    share = 0.75 if finding.change.startswith("sync_every") else 1
    assert finding.high_ms == pytest.approx(share * planted["wire"] / planted.get("sync_every", 4))
    assert advice.lines()[0].startswith("1. exposed sends: Ranks wait for what they send, for ")


def test_the_gain_over_an_emulated_link_is_predicted(tmp_path):
    """1.25 MB between two ranks at 1 Gbit/s take 10 ms, of which a delay of a step hides all."""
    advice = advice_of(tmp_path, wire=10, link="1gbit")
    (finding,) = advice.wrong
    assert finding.basis == "simulator" and "fragment_sync_delay=1" in finding.change
    assert finding.low_ms == pytest.approx(2.5, rel=0.1) == finding.high_ms
    # Recorded steps that are longer than this link explains are no ground for a prediction.
    (finding,) = advice_of(tmp_path, wire=60, link="1gbit").wrong
    assert finding.basis == "bound"


def test_a_rank_that_is_late_for_sends(tmp_path):
    advice = advice_of(tmp_path, computing=(10, 15, 10), wire=1)
    (finding,) = advice.wrong
    assert finding.cause == "straggler" and finding.low_ms == pytest.approx(5)
    assert "the others wait 5 ms in a step until it has entered (5 intervals" in finding.evidence


@pytest.mark.parametrize("world", (1, 2, 4))
def test_nothing_is_found_where_nothing_is_wrong(tmp_path, world):
    advice = advice_of(tmp_path, computing=(10,) * world, wire=1, outer=2)
    assert advice.lines() == ["Nothing to gain here."]
    assert "5 intervals of 4 steps of 10.8 ms, of which 0.250 ms are exposed" in advice.headline


def test_what_is_too_short_says_so(tmp_path, capsys):
    path = written(tmp_path / "run.json", intervals=1)
    content = path.read_text().replace('"sync_every":4', '"sync_every":8')
    path.write_text(content)
    assert main(["advise", str(path)]) == 0
    assert "Not known: intervals, since none is whole: record 8 steps." in capsys.readouterr().out
