"""What a rank logs when it has waited for long: which rank holds it up, and what that rank does.

Long before the deadline, which may be half an hour away, the log says what ``dpcore inspect --job``
would say. It is read in the same black boxes, so nothing is sent, and the rank that is late need
not answer. Called by the thread that notes where the program is (dpcore/comm/launch/placement.py).
"""

from __future__ import annotations

import contextlib
import logging
import os

from dpcore.errors import Error
from dpcore.tools.diagnose.black_box import ranks_of_this_host
from dpcore.tools.diagnose.hang import Verdict, judge
from dpcore.tools.diagnose.job import Family, beside, families

_log = logging.getLogger("dpcore")


def warn(timeout: float) -> None:
    """``timeout``: of the operation that this process waits in. One rank of each host speaks."""
    with contextlib.suppress(Error, OSError):  # then there are no black boxes to be read
        own = os.getpid()
        for family in families(beside([own], ranks_of_this_host()))[0]:
            verdict = judge(family)
            if verdict.hangs and _speaker(family, verdict) == own:
                _log.warning("%s", text_of(family, verdict, timeout))


def _speaker(family: Family, verdict: Verdict) -> int | None:
    """The process of the first rank of this host that waits."""
    processes = [family.ranks[rank].process for rank in sorted(w.rank for w in verdict.waits)]
    return next((process for process in processes if process is not None), None)


def text_of(family: Family, verdict: Verdict, timeout: float) -> str:
    """One line for a log."""
    says = verdict.says
    if len(family.ranks) < family.world:
        longest = verdict.waits[0]
        says = [
            f"Rank {longest.rank} waits in {longest.what}, for {longest.seconds:.1f} s. Not all "
            "ranks can be looked into from here."
        ]
    end = (
        f"The wait ends with a Timeout after {timeout:g} s (timeout= of dpcore.init() or "
        "init_process_group())."
        if timeout < 1e9
        else "The wait has no deadline."
    )
    return " ".join(["dpcore:", *says, end])
