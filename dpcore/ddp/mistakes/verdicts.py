"""What it means that the words of ranks differ, and how to say it.

Every rank has the words of all, and judges alike. Whether the ranks train different models is not
taken from words: their parameters are compared, once for each kind of difference. A cause that a
word names, and parameters that differ, are a proof.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dpcore.ddp.mistakes.comparisons import (
    Difference,
    difference,
    odd_ones,
    others_in_words,
    ranks_in_words,
    setting_that_differs,
)
from dpcore.ddp.mistakes.reports import Reports


class Finding(enum.IntFlag):
    """In what ranks differ: StepWords::Finding of csrc/reducer/backward/step_words.h."""

    STEPS = 1
    OPTIMIZER_STEPS = 2
    LOCAL_FORWARDS = 4
    KEPT_GRADIENTS = 8
    HYPERPARAMETERS = 16
    MODES = 32
    DIGEST = 64
    SAMPLES = 128
    LOADS = 256
    SAME_DATA = 512


class Said(NamedTuple):
    """A rank's word: StepWords::Said."""

    step: int
    optimizer_steps: int
    local_forwards: int
    unaveraged_steps: int
    flags: int
    hyperparameters: int
    modes: int
    digest: int
    samples: int
    loads: int
    data: int


_KEEPS_GRADIENTS = 2
_OF_PARAMETERS = (
    Finding.STEPS
    | Finding.OPTIMIZER_STEPS
    | Finding.KEPT_GRADIENTS
    | Finding.HYPERPARAMETERS
    | Finding.LOADS
    | Finding.DIGEST
)


class _Cause(NamedTuple):
    kind: str
    text: str  # what was seen, and on which ranks
    remedy: str
    tells_alone: bool = False  # also while the parameters are equal


def judge(
    model: Any,
    findings: int,
    words: list[tuple[Any, ...]],
    reports: Reports,
    first_unaveraged: str,
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Raises, warns or notes. All ranks call it with the same words."""
    found = Finding(findings)
    said = [Said(*word) for word in words]
    where = f"rank {model.group.rank}, step {said[0].step}: "
    # All are told by now, or are wrong; a digest that differs may get a cause later.
    model._reducer.set_known_findings(int(found))
    if found & _OF_PARAMETERS:
        causes = _causes(found, said, first_unaveraged)
        if found & Finding.HYPERPARAMETERS:
            causes.append(_of_hyperparameters(said, setting_that_differs(model, optimizers)))
        _judge_parameters(model, found, said, reports, where, causes)
    if found & Finding.MODES:
        odd = odd_ones([each.modes for each in said])
        reports.warn(
            "modes",
            f"{where}some modules of {ranks_in_words(odd)} are in eval() where those of "
            f"{others_in_words(len(said), odd)} are in train(), or the other way round: BatchNorm "
            "and Dropout do different things on different ranks. Call model.train() or "
            "model.eval() on all ranks alike",
        )
    for kind, text in _notes(found, said):
        reports.note(kind, where + text)


def _judge_parameters(
    model: Any,
    found: Finding,
    said: list[Said],
    reports: Reports,
    where: str,
    causes: list[_Cause],
) -> None:
    differs = difference(model)
    if differs is None:
        if found & Finding.OPTIMIZER_STEPS:
            model._reducer.rebase_optimizer_steps(max(each.optimizer_steps for each in said))
            model._reducer.set_known_findings(int(found & ~Finding.OPTIMIZER_STEPS))
        if found & Finding.DIGEST and model._across is not None:
            odd = odd_ones([each.digest for each in said])
            why = f": {causes[0].text}. {causes[0].remedy}" if causes else ""
            reports.warn(
                "parameters differ",
                f"{where}the parameters of {ranks_in_words(odd)} differed from those of "
                f"{others_in_words(len(said), odd)} before this step, and schedule="
                f"'{model.schedule}' has put together one model from all of them{why}",
            )
            return
        for cause in causes:
            if cause.tells_alone:
                reports.warn(cause.kind, f"{where}{cause.text}. {cause.remedy}")
    elif causes:
        cause = causes[0]
        reports.prove(cause.kind, f"{where}{cause.text}, and {differs.in_words()}. {cause.remedy}")
    elif differs.is_rounding:
        reports.note(
            "parameters differ by rounding",
            f"{where}{differs.in_words()}: as much as processors of different kinds make",
        )
    elif differs.has_moved:
        reports.warn("parameters differ", _put_back_inexactly(where, differs))
    else:
        reports.warn("parameters differ", _without_cause(where, differs))


def _put_back_inexactly(where: str, differs: Difference) -> str:
    return (
        f"{where}{differs.in_words()}, now that every rank has changed its own since the "
        "optimizer's last step. If that is for one backward, as in SAM, put back a copy of the "
        "weights: subtraction leaves them different by rounding. Otherwise change them alike, by "
        "random numbers with the same seed, say. dpcore.check(model, optimizer) after a step "
        "compares them"
    )


def _without_cause(where: str, differs: Difference) -> str:
    return (
        f"{where}{differs.in_words()}. Nothing that this model's ranks say of their steps explains "
        "it: look for code on one rank only, or with another seed, that changes weights or "
        "gradients, or initialises them after wrapping. From here on the ranks train different "
        "models; dpcore.check(model, optimizer) compares them whenever you call it"
    )


def _causes(found: Finding, said: list[Said], first_unaveraged: str) -> list[_Cause]:
    """What words say that makes parameters differ, the likeliest first."""
    causes = []
    if any(each.unaveraged_steps for each in said):
        ranks = [rank for rank, each in enumerate(said) if each.unaveraged_steps]
        most = max(each.unaveraged_steps for each in said)
        count = "a step" if most == 1 else f"{most} steps"
        causes.append(
            _Cause(
                "never averaged",
                f"the optimizer of {ranks_in_words(ranks)} has taken {count} with gradients that "
                "were never averaged",
                (first_unaveraged[:1].upper() + first_unaveraged[1:])
                or "Leave the last micro-batch before each step outside no_sync(), and call "
                "model(x), not model.module(x)",
            )
        )
    if found & Finding.OPTIMIZER_STEPS:
        steps = [each.optimizer_steps for each in said]
        causes.append(
            _Cause(
                "optimizer steps",
                f"the number of steps that optimizers have taken is {_per_rank(steps)}",
                "Call optimizer.step() on all ranks or on none: make what a rank decides by, such "
                "as its loss or a NaN in it, common to all ranks by an all_reduce first. A rank "
                "that runs one backward more than the others gets here as well",
            )
        )
    if found & Finding.LOADS:
        loads = [each.loads for each in said]
        causes.append(
            _Cause(
                "loads",
                "the number of calls of load_state_dict(), of the model or its optimizer, is "
                f"{_per_rank(loads)}",
                "Load on all ranks, or before the model is wrapped, which broadcasts rank 0's "
                "weights; the optimizer's state is never broadcast",
            )
        )
    if found & Finding.KEPT_GRADIENTS:
        keeps = [each.flags & _KEEPS_GRADIENTS for each in said]
        kept = [rank for rank, has in enumerate(keeps) if has]
        causes.append(
            _Cause(
                "kept gradients",
                f"{ranks_in_words(kept)} still has the gradients of the step before, which "
                f"{others_in_words(len(said), kept)} has cleared",
                "Call optimizer.zero_grad() on all ranks alike",
                tells_alone=True,
            )
        )
    return causes


def _of_hyperparameters(said: list[Said], setting: tuple[str, list[str]] | None) -> _Cause:
    odd = odd_ones([each.hyperparameters for each in said])
    if setting is not None:
        what = f"the optimizer's {setting[0]} is {_per_rank(setting[1])}"
    else:  # changed back since then
        what = (
            f"the optimizer of {ranks_in_words(odd)} had other hyperparameters in this step than "
            f"that of {others_in_words(len(said), odd)}"
        )
    return _Cause(
        "hyperparameters",
        what,
        "Make optimizers and schedulers alike on all ranks; a scheduler that follows a loss, such "
        "as ReduceLROnPlateau, needs one that is averaged over the ranks",
        tells_alone=True,
    )


def _notes(found: Finding, said: list[Said]) -> list[tuple[str, str]]:
    notes = []
    if found & Finding.SAMPLES:
        counts = [each.samples for each in said]
        notes.append(
            (
                "samples",
                f"the ranks have batches of {_list(counts)} samples: the average of their means is "
                "not the mean over all samples. For that, `with model.weighted(count):` around "
                "forward and backward",
            )
        )
    if found & Finding.LOCAL_FORWARDS:
        counts = [each.local_forwards + 1 for each in said]
        notes.append(("micro-batches", f"the ranks have {_list(counts)} micro-batches in it"))
    if found & Finding.SAME_DATA:
        notes.append(
            (
                "same data",
                "all ranks have had the same inputs for several steps: a DistributedSampler, or "
                "another part of the data for each rank, makes more ranks see more data",
            )
        )
    return notes


def _list(counts: Sequence[int]) -> str:
    shown = ", ".join(map(str, counts[:8]))
    return shown + (", ..." if len(counts) > 8 else "")


def _per_rank(values: Sequence[Any]) -> str:
    """ "0.1 on rank 0, 0.2 on rank 1"; of many ranks, the odd ones and the others."""
    odd = odd_ones(values)
    usual = next(value for rank, value in enumerate(values) if rank not in odd)
    by_value: dict[Any, list[int]] = {}
    for rank in odd:
        by_value.setdefault(values[rank], []).append(rank)
    shown = [f"{value} on {ranks_in_words(ranks)}" for value, ranks in by_value.items()]
    return ", ".join([f"{usual} on {others_in_words(len(values), odd)}", *shown])
