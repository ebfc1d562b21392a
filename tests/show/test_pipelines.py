"""Pipelines in dpcore show: passes, messages, and the bubble beside what the plan costs."""

import json

import pytest

import dpcore as dp
from dpcore.__main__ import main
from dpcore.parallel.pipeline_plans import PipelinePlan
from dpcore.recorder import file as trace_file
from dpcore.recorder.file import RankRecord
from dpcore.tools.show import figures_of, read_run
from dpcore.tools.show.page import page_text
from dpcore.tools.show.pipelines import messages_of

from .browser import needs_browser
from .traces import page_of, span

HALVES = PipelinePlan.from_csv("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1", "halves")
LINK = 0.5


def write_pipeline(path, plan, steps=2, copies=1):
    """What ranks that follow the plan would record: a forward takes 2 ms, a backward 4. Each copy
    of the pipeline has ranks of its own, and the same tags."""
    price = plan.price(2.0, 4.0, link=LINK)
    ends = {action: end for spans in price.spans for action, _, end in spans}
    ranks = len(plan.actions)
    records = []
    for rank in range(ranks * copies):
        events = []
        for begin in (step * (price.seconds + 3) for step in range(steps)):
            for action, first, last in price.spans[rank % ranks]:
                events.append(span(str(action), "compute", begin + first, begin + last))
                for need in plan.needs(action):
                    there = plan.rank_of[need.stage]
                    if there == rank % ranks:
                        continue
                    tag, peer = 10 * need.microbatch + need.stage, rank - rank % ranks + there
                    came = begin + ends[need] + LINK
                    events.append(span("recv", "operation", came - 1, came, tag, 64, peer))
            for needing in ends:
                for need in plan.needs(needing):
                    there = plan.rank_of[needing.stage]
                    if plan.rank_of[need.stage] != rank % ranks or there == rank % ranks:
                        continue
                    tag, peer = 10 * need.microbatch + need.stage, rank - rank % ranks + there
                    sent = begin + ends[need]
                    events.append(span("send", "operation", sent, sent + 0.1, tag, 64, peer))
        records.append(RankRecord(rank, 100 + rank, {1: "main"}, 0, events))
    trace_file.write(path, records, ranks * copies, {"transport": "shm"})
    return path


def test_the_bubble_is_that_of_the_plan_and_its_links(tmp_path):
    plan = dp.pipeline_plan("1F1B", stages=3, microbatches=4)
    run = read_run(write_pipeline(tmp_path / "run.json", plan, steps=3, copies=2))
    found = figures_of(run).pipeline
    assert found.steps == 3
    assert found.bubble == pytest.approx(plan.price(2.0, 4.0, link=LINK).bubble)
    assert found.priced == pytest.approx(plan.price(2.0, 4.0).bubble) == pytest.approx(1 / 3)
    assert [line.stages for line in found.ranks] == [[0], [1], [2]] * 2
    assert [line.live for line in found.ranks] == plan.live() * 2
    assert {(line.forward_ms, line.backward_ms) for line in found.ranks} == {(2.0, 4.0)}
    # A rank that runs all passes of the step but the waiting: the last one waits at both ends.
    assert found.bubble == pytest.approx(sum(line.bubble for line in found.ranks) / 6)


def test_halves_of_a_backward_are_priced_too(tmp_path):
    run = read_run(write_pipeline(tmp_path / "run.json", HALVES))
    found = figures_of(run).pipeline
    assert found.priced == pytest.approx(HALVES.price(2.0, 4.0).bubble)
    assert [line.backward_ms for line in found.ranks] == [4.0, 4.0]
    assert [line.live for line in found.ranks] == HALVES.live()


def test_messages_are_sends_with_their_receives(tmp_path):
    """Also where copies of a pipeline use the same tags, and where tags come again."""
    plan = dp.pipeline_plan("GPipe", stages=2, microbatches=3)
    run = read_run(write_pipeline(tmp_path / "run.json", plan, steps=2, copies=2))
    found = messages_of(run)
    assert len(found) == 2 * 2 * 2 * 3
    assert {message.end_ns - message.begin_ns for message in found} == {LINK * 1e6}
    ways = [(message.source, message.target) for message in found]
    assert {way: ways.count(way) for way in ways} == dict.fromkeys(
        [(0, 1), (1, 0), (2, 3), (3, 2)], 6
    )


def test_what_is_no_whole_pipeline_has_no_price(tmp_path):
    halved = PipelinePlan.from_csv("0F0,0B0", "one stage")
    path = write_pipeline(tmp_path / "run.json", halved, steps=1)
    content = json.loads(path.read_text())
    content["traceEvents"] = [e for e in content["traceEvents"] if e["name"] != "0B0"]
    path.write_text(json.dumps(content))
    found = figures_of(read_run(path)).pipeline
    assert found.priced is None and found.headline == "bubble 0.0%"
    content["traceEvents"] = [e for e in content["traceEvents"] if e["name"] != "0F0"]
    content["traceEvents"].append({**trace_event("forward"), "cat": "compute"})
    path.write_text(json.dumps(content))
    assert figures_of(read_run(path)).pipeline is None
    assert "Pipeline" not in page_text([read_run(path)])


def trace_event(name):
    return {"ph": "X", "pid": 0, "tid": 1, "name": name, "ts": 0.0, "dur": 5.0}


def test_terminal_json_and_picture_have_it(tmp_path, capsys):
    path = write_pipeline(tmp_path / "run.json", HALVES)
    picture = tmp_path / "run.png"
    assert main(["show", str(path), "--json", "--png", str(picture)]) == 0
    said = json.loads(capsys.readouterr().out)
    pipeline = (said[0] if isinstance(said, list) else said.get("runs", [said])[0])["pipeline"]
    assert pipeline["ranks"][0]["stages"] == [0] and pipeline["priced"] < pipeline["bubble"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@needs_browser
def test_the_page_draws_passes_and_arrows(browser, tmp_path):
    browser.size(1280, 900)
    browser.open(page_of(tmp_path, write_pipeline(tmp_path / "run.json", HALVES, steps=1)))
    assert "bubble 2" in browser.text(".headline") and "priced" in browser.text(".headline")
    assert "Pipeline: bubble" in browser.text("#tables")
    assert "of weights (W)" in browser.text("#legend")
    drawn = browser.run("""(() => { const t = page.timelines[0], arrows = [];
      const band = t.layout.bands.find((b) => b.kind === "compute" && b.rank === 0);
      t.painter.arrow = (scale, begin, fromY, end, toY) => arrows.push([begin, end, toY > fromY]);
      t.draw();
      const told = (_, i) => [t.nameOf(band.lane, i), t.colourOf(band)(i)];
      const passes = [...band.lane.label].map(told);
      return { arrows, passes, colours: t.painter.colour }; })()""")
    colour = drawn["colours"]
    kinds = {"F": "forward", "I": "input", "W": "weight"}
    assert [name for name, _ in drawn["passes"]] == ["F0", "F1", "I0", "W0", "I1", "W1"]
    assert all(shade == colour[kinds[name[0]]] for name, shade in drawn["passes"])
    assert len({colour[name] for name in kinds.values()}) == 3
    assert sum(down for *_, down in drawn["arrows"]) == 2 and len(drawn["arrows"]) == 4
    told = browser.run("""(() => { const t = page.timelines[0];
      const of = (kind) => t.layout.bands.find((b) => b.kind === kind && b.rank === 0);
      const first = (band) => describe(t, { band, lane: band.lane, index: 0 })[0];
      return [of("compute"), of("operation")].map(first); })()""")
    assert told[0] == "0F0: forward of micro-batch 0, stage 0"
    assert told[1] == "send to rank 1"
    assert browser.problems == []


@needs_browser
def test_a_rank_with_several_stages_names_them(browser, tmp_path):
    plan = dp.pipeline_plan("Interleaved1F1B", stages=4, microbatches=2, ranks=2)
    browser.open(page_of(tmp_path, write_pipeline(tmp_path / "run.json", plan, steps=1)))
    names = browser.run("""(() => { const t = page.timelines[0];
      const lane = t.layout.bands.find((b) => b.kind === "compute" && b.rank === 1).lane;
      return [...lane.label].map((_, i) => t.nameOf(lane, i)); })()""")
    assert names == [str(action) for action in plan.actions[1]]
