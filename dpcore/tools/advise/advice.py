"""All findings of a run, the one with most to gain first, and the text that says them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dpcore.base.markup import short
from dpcore.errors import Error
from dpcore.tools.advise import of_buckets, of_links, of_local, of_ranks
from dpcore.tools.advise.evidence import Evidence, evidence_of
from dpcore.tools.advise.finding import Finding
from dpcore.tools.advise.of_schedules import schedules
from dpcore.tools.show.run import Run
from dpcore.tools.simulate.gradients import gradients_of

Cause = Callable[[Evidence], Finding | None]

_UNEXPLAINED = 0.2  # of a step

CAUSES: tuple[Cause, ...] = (
    of_ranks.straggler,
    of_ranks.batches,
    of_ranks.loader,
    of_ranks.between,
    of_ranks.threads,
    of_ranks.governor,
    of_links.slow_messages,
    of_links.syncs,
    of_buckets.tiny,
    of_buckets.giant,
    of_buckets.first_late,
    of_buckets.at_end,
    of_buckets.unused,
    of_buckets.copies,
    of_buckets.whole_optimizer,
    of_links.half_the_bytes,
)


@dataclass(frozen=True)
class Advice:
    evidence: Evidence
    findings: tuple[Finding, ...]

    @property
    def headline(self) -> str:
        """The run in a line."""
        e = self.evidence
        if not e.count:
            return "too few steps to advise on"
        ranks = "1 rank" if e.world == 1 else f"{e.world} ranks"
        return (
            f"{ranks} of {e.stack} over {e.library or 'nothing'}, {e.counted} of "
            f"{short(e.step_ms)} ms, of which {short(e.median(lambda s: s.exposed_ms))} ms are "
            "exposed communication"
        )

    @property
    def wrong(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.trades]

    def lines(self) -> list[str]:
        """The first line names the cause with most to gain, or says that there is none."""
        e = self.evidence
        lines = []
        for number, finding in enumerate(self.wrong, 1):
            lines += [f"{number}. {finding.cause}: {finding.says}", *_told(finding, e.step_ms)]
        if not self.wrong:
            lines.append("Nothing to gain here." if e.count else "Nothing can be said.")
            exposed = e.median(lambda step: step.exposed_ms)
            if exposed > _UNEXPLAINED * e.step_ms and not self.findings:
                lines.append(
                    f"None of the known causes explains that {short(exposed)} ms of a step are "
                    "exposed; dpcore compare measures what other settings make of it."
                )
        for finding in self.findings:
            if finding.trades:
                lines += [f"Could be tried: {finding.says}", *_told(finding, e.step_ms)]
        lines += [f"Not known: {words}." for words in e.unknown]
        return lines

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "headline": self.headline,
            "step_ms": self.evidence.step_ms,
            "steps": self.evidence.count,
            "nothing_to_gain": not self.wrong and self.evidence.count > 0,
            "findings": [asdict(finding) for finding in self.findings],
            "unknown": list(self.evidence.unknown),
        }


def advice_on(run: Run, files: Sequence[Path], expected: float = 0.0) -> Advice:
    """``files``: of the run, for what the simulator says."""
    evidence = evidence_of(run)
    more: list[Finding] = []
    with contextlib.suppress(Error):  # it has no single model, or no sizes
        work = gradients_of(*files) if run.link else None
        if evidence.updates is not None:
            more = [finding for finding in [of_local.sends(evidence, work)] if finding is not None]
        elif work is not None:
            more = schedules(evidence, work)
    return advise(evidence, expected, more)


def lines_of(run: Run) -> list[str]:
    """The advice on a run as text, as ``dpcore show`` prints it: nothing for a run without steps,
    such as a pipeline's."""
    advice = advice_on(run, [run.path])
    return advice.lines() if advice.evidence.count else []


def advise(e: Evidence, expected: float = 0.0, more: Sequence[Finding] = ()) -> Advice:
    """``expected``: bytes per second that the link should carry, if known."""
    found = [cause(e) for cause in CAUSES]
    found.append(of_links.slow_link(e, expected))
    findings = [finding for finding in (*found, *more) if finding is not None]
    if any(finding.cause == "slow link" for finding in findings):
        findings = [finding for finding in findings if finding.cause != "bytes"]
    return Advice(e, tuple(sorted(findings, key=lambda finding: -finding.high_ms)))


def _told(finding: Finding, step_ms: float) -> list[str]:
    return [
        f"   seen    {finding.evidence}",
        f"   gain    {finding.gain(step_ms)}",
        f"   change  {finding.change}",
    ]
