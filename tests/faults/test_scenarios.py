"""Runs the tables of scenarios.py and disagreements.py.

Every survivor raises the right class, in time, names the first culprit and the operation, and
raises the same again at its next call; nobody hangs.
"""

import re
import time
from dataclasses import replace

import pytest

from dpcore.comm.launch.spawn import run_processes

from . import disagreements, scenarios
from .scenarios import observe, read_stamp
from .tries import in_time, three_tries


def run(scenario, stamp):
    started = time.monotonic()
    outcomes = run_processes(
        observe,
        scenario.world,
        (scenario, str(stamp)),
        timeout=scenario.timeout,
        options={"transport": scenario.transport},
        environment={"DPCORE_FAULT": scenario.fault} if scenario.fault else None,
        deadline=scenario.timeout + 10,
        grace=scenario.timeout,  # whether the survivors were quick is judged below
    )
    fault_at = read_stamp(stamp)[0] if stamp.exists() else started
    return outcomes, fault_at


def check_message(scenario, message):
    for pattern in scenario.says:
        pattern = pattern.replace("{victim}", str(scenario.victim))
        assert re.search(pattern, message), f"{pattern!r} is not in {message!r}"


TABLE = scenarios.TABLE + disagreements.TABLE


def over_tcp(scenario):
    """The same between ranks that share no memory. The word that a small operation is finished
    travels with the next frame that somebody waits for, so it may not have come."""
    says = tuple(pattern.replace("finished [", "(finished|entered) [") for pattern in scenario.says)
    return replace(scenario, transport="tcp", says=says)


TABLE += [over_tcp(scenario) for scenario in TABLE if not scenario.on_one_host]


@pytest.mark.parametrize("scenario", TABLE, ids=str)
@three_tries
def test_scenario(scenario, tmp_path):
    outcomes, fault_at = run(scenario, tmp_path / f"stamp-{time.monotonic_ns()}")
    reports = [outcome.result for outcome in outcomes if outcome.rank != scenario.victim]
    apart = seconds_apart(scenario, reports, fault_at)
    in_time(apart <= scenario.not_before / 2, f"the ranks came {apart:.3f} s apart")
    check(scenario, outcomes)
    if scenario.error:
        slowest = slowest_of(scenario, reports, fault_at)
        print(f"noticed after {slowest:.3f} s")
        in_time(slowest <= scenario.within, f"noticed after {slowest:.3f} s")


def seconds_apart(scenario, reports, fault_at):
    """Where a deadline tells who has not come, somebody who is merely slow would be named too."""
    if scenario.error != "Timeout" or not all(report and report["entered"] for report in reports):
        return 0.0
    moments = [fault_at, *(report["entered"] for report in reports)]
    return max(moments) - min(moments)


def check(scenario, outcomes):
    assert outcomes[scenario.victim].exit_code == scenario.exit_code
    if not scenario.error:
        assert [outcome.error for outcome in outcomes] == [None] * scenario.world
        assert [outcome.result["error"] for outcome in outcomes] == [None] * scenario.world
        return
    for outcome in outcomes:
        if outcome.rank == scenario.victim:
            continue
        assert outcome.error is None and outcome.exit_code == 0, outcome
        report = outcome.result
        assert report["error"] == scenario.error, report
        check_message(scenario, report["message"])
        assert report["message"].startswith(f"rank {outcome.rank}: ")
        assert report["again"] == (report["error"], report["message"])
    check_victim(scenario, outcomes[scenario.victim])


def slowest_of(scenario, reports, fault_at):
    """How late the last one was; nobody was early."""
    if not scenario.from_own_call:
        # The death is dated by one process and its discovery by another: some slack.
        assert min(report["at"] for report in reports) - fault_at >= scenario.not_before - 0.1
        return max(report["at"] - fault_at for report in reports)
    first = min(report["entered"] for report in reports)  # the first deadline is that of all
    assert min(report["at"] for report in reports) - first >= scenario.not_before
    return max(report["at"] - report["entered"] for report in reports)


def check_victim(scenario, outcome):
    if scenario.victim_error is None:
        return
    if outcome.error is not None:
        assert type(outcome.error).__name__ == scenario.victim_error
    else:
        assert outcome.result["error"] == scenario.victim_error
        check_message(scenario, outcome.result["message"])
