"""benchmarks.plans: what becomes of each plan in a folder, and the table of docs/plans.md."""

from benchmarks import plans
from benchmarks.harness.figures import load
from tests.comm.plan_files import PLANS


def test_plans_are_proved_run_or_refused_with_the_place(tmp_path):
    for name in ("in_scratch.xml", "by_packets.json"):
        (tmp_path / name).write_text(PLANS[name])
    wrong = PLANS["in_scratch.xml"].replace('type="re"', 'type="cpy"', 1)
    (tmp_path / "wrong.xml").write_text(wrong)
    (tmp_path / "other.xml").write_text(PLANS["gather.xml"].replace("allgather", "custom"))
    (tmp_path / "cut.xml").write_text(PLANS["ring.xml"][:500])
    (tmp_path / "page.xml").write_text("<html/>")
    (tmp_path / "package.json").write_text('{"name": "mine"}')
    found = {one["file"]: one for one in plans.records_of("mine at 1", tmp_path)}
    assert {name: (one["result"], one["ran"]) for name, one in found.items()} == {
        "in_scratch.xml": (plans.PROVED, True),
        "by_packets.json": (plans.PROVED, True),
        "wrong.xml": (plans.REFUTED, False),
        "other.xml": (plans.OTHER, False),
        "cut.xml": (plans.UNREAD, False),
    }
    facts = {"date": "2026-11-29T00:00:00+00:00", "commit": "abcdef0123456"}
    table = plans.table_of_plans([facts | one for one in found.values()])
    assert "| mine at 1 | 3 | 2 | 1 | 2 |" in table and "| all | 3 | 2 | 1 | 2 |" in table
    assert "1 more are for collectives that dpcore does not have." in table
    assert f"* `wrong.xml` (mine): {found['wrong.xml']['says']}" in table


def test_the_record_has_every_public_plan_and_each_refutation_names_its_place():
    record = load("plans")
    assert len({one["from"] for one in record}) >= 5
    proved = [one for one in record if one["result"] == plans.PROVED]
    assert len(proved) > 80 and all(one["ran"] for one in proved)
    for one in record:
        if one["result"] == plans.REFUTED:
            assert any(word in one["says"] for word in ("line ", "gpus[", "gpu "))
