"""An Error that one rank raises by itself is what the others raise, and not that it "left"."""

import subprocess
from pathlib import Path

import pytest

from tests.ranks import python

SCRIPT = str(Path(__file__).with_name("own_errors.py"))
OPERATOR = "Unsupported: unknown reduction"
LATER = ": added, replaced or unfrozen after the model was wrapped"
CASES = {
    "unknown operator": ("gave up: ", OPERATOR),
    "replaced": ("gave up: ", "Error: 2.weight" + LATER),
    "unfrozen": ("gave up: ", "Error: 1.weight, 1.bias" + LATER),
    "in backward": ("gave up: ", OPERATOR),
    "in a hook": ("gave up: ", OPERATOR),
    "in a split group": ("gave up: ", "Error: 1.weight, 1.bias" + LATER),
    "in a group of gloo": ("gave up: ", "Error: 2.weight" + LATER),
    "in a group of dpcore": ("gave up: ", "Error: 2.weight" + LATER),
    "then finalized": ("finalized and left after an error", OPERATOR),
    "then destroyed": ("after an error", "Error: 2.weight" + LATER),
}


@pytest.mark.patient
@pytest.mark.parametrize(("world", "transport"), [(2, "shm"), (3, "tcp")])
@pytest.mark.parametrize("case", CASES)
def test_the_others_hear_of_it(case, world, transport, tmp_path):
    ranks = [
        python.start(
            SCRIPT, case, str(rank), str(world), transport, str(tmp_path),
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    said = [rank.communicate(timeout=90)[1] for rank in ranks]
    how, what = CASES[case]
    assert what in said[1] and "PeerLost" not in said[1], said[1]
    for rank in set(range(world)) - {1}:
        last = said[rank].rstrip().splitlines()[-1]
        assert "PeerLost" in last and "rank 1" in last, said[rank]
        assert how in last and what in last, said[rank]
        assert "join()" not in last, last
