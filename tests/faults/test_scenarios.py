"""Runs the tables of scenarios.py and disagreements.py.

Every survivor raises the right class, in time, names the first culprit and the operation, and
raises the same again at its next call; nobody hangs.
"""

import re
import time
from dataclasses import replace

import pytest

from dpcore.ranks import run_processes

from . import disagreements, scenarios
from .scenarios import observe, read_stamp


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
        grace=1.0 if scenario.victim_error else 0.3,
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


TABLE += map(over_tcp, TABLE.copy())


@pytest.mark.parametrize("scenario", TABLE, ids=str)
def test_scenario(scenario, tmp_path):
    outcomes, fault_at = run(scenario, tmp_path / "stamp")
    assert outcomes[scenario.victim].exit_code == scenario.exit_code
    if not scenario.error:
        assert [outcome.error for outcome in outcomes] == [None] * scenario.world
        assert [outcome.result["error"] for outcome in outcomes] == [None] * scenario.world
        return
    delays = []
    for outcome in outcomes:
        if outcome.rank == scenario.victim:
            continue
        assert outcome.error is None and outcome.exit_code == 0, outcome
        report = outcome.result
        assert report["error"] == scenario.error, report
        check_message(scenario, report["message"])
        assert report["message"].startswith(f"rank {outcome.rank}: ")
        assert report["again"] == (report["error"], report["message"])
        delays.append(report["at"] - fault_at)
    print(f"noticed after {max(delays):.3f} s")
    assert max(delays) <= scenario.within
    # The death is dated by one process and its discovery by another: some slack.
    assert min(delays) >= scenario.not_before - 0.1
    check_victim(scenario, outcomes[scenario.victim])


def check_victim(scenario, outcome):
    if scenario.victim_error is None:
        return
    if outcome.error is not None:
        assert type(outcome.error).__name__ == scenario.victim_error
    else:
        assert outcome.result["error"] == scenario.victim_error
        check_message(scenario, outcome.result["message"])
