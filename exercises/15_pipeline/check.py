"""Checks of the exercise beside this file."""

from dpcore.errors import Unsupported
from dpcore.parallel.pipeline_plans import Action, PipelinePlan
from dpcore.school.exercise.judging import Wrong, need

ALLOWED = ()


def cases():
    """(stages, micro-batches): small ones first, so that the first mistake is easy to see."""
    return [(1, 1), (1, 3), (2, 1), (2, 2), (2, 3), (3, 4), (4, 2), (4, 4), (4, 8), (5, 12), (8, 3)]


def plans(on, student):
    return [student.plan(*case) for case in cases()]


def each_plan(lab):
    """Cases, what was given, and the same in words."""
    (found,) = lab.ranks("plans", 1)
    for (stages, microbatches), rows in zip(cases(), found, strict=True):
        asked = f"plan({stages}, {microbatches})"
        is_one = isinstance(rows, list) and all(isinstance(row, list) for row in rows)
        if not is_one or not all(is_pass(p) for row in rows for p in row):
            raise Wrong(f"{asked} gives {rows}, which is not a list of lists of passes")
        need(len(rows) == stages, f"{asked} has {len(rows)} lists for {stages} stages")
        yield stages, microbatches, rows, asked


def is_pass(found):
    return (
        isinstance(found, list)
        and len(found) == 2
        and found[0] in ("F", "B")
        and isinstance(found[1], int)
    )


def made_of(rows, asked):
    """The plan, which is one that ends."""
    actions = tuple(
        tuple(Action(stage, kind, m) for kind, m in row) for stage, row in enumerate(rows)
    )
    try:
        return PipelinePlan(asked, actions)
    except Unsupported as problem:
        raise Wrong(str(problem)) from None


def in_words(row):
    return " ".join(f"{kind}{m}" for kind, m in row)


def check_each_once(lab):
    """Every stage runs the forward and the backward of each micro-batch once."""
    for _, microbatches, rows, asked in each_plan(lab):
        for stage, row in enumerate(rows):
            for kind in "FB":
                of_kind = [m for which, m in row if which == kind]
                need(
                    sorted(of_kind) == list(range(microbatches)),
                    f"{asked}: stage {stage} runs {in_words(row)}, which is not {kind}0 to "
                    f"{kind}{microbatches - 1}, each once",
                )


def check_in_order(lab):
    """Forwards go from micro-batch 0 upwards, and so do backwards."""
    for _, _, rows, asked in each_plan(lab):
        for stage, row in enumerate(rows):
            for kind in "FB":
                of_kind = [m for which, m in row if which == kind]
                need(of_kind == sorted(of_kind), f"{asked}: stage {stage} runs {in_words(row)}")


def check_ends(lab):
    """No pass waits for one that waits for it."""
    for _, _, rows, asked in each_plan(lab):
        made_of(rows, asked)


def check_turns(lab):
    """Each stage begins with its early forwards, then runs a forward and a backward in turns."""
    for stages, microbatches, rows, asked in each_plan(lab):
        for stage, row in enumerate(rows):
            early = min(stages - 1 - stage, microbatches)
            turns = microbatches - early
            right = "F" * early + "FB" * turns + "B" * early
            need(
                "".join(kind for kind, _ in row) == right,
                f"{asked}: stage {stage} runs {in_words(row)}; {early} forwards come first, then "
                f"{turns} turns of a forward and a backward, then {early} backwards",
            )


def check_kept(lab):
    """A stage keeps the activations of no more micro-batches than there are stages from it on."""
    for stages, _, rows, asked in each_plan(lab):
        for stage, live in enumerate(made_of(rows, asked).live()):
            need(
                live <= stages - stage,
                f"{asked}: stage {stage} runs {in_words(rows[stage])} and keeps {live} "
                f"micro-batches at once, where {stages - stage} will do",
            )


def check_bubble(lab):
    """No rank is idle for longer than it has to be."""
    for stages, microbatches, rows, asked in each_plan(lab):
        bubble = made_of(rows, asked).price().bubble
        least = (stages - 1) / (microbatches + stages - 1)
        need(
            bubble < least + 1e-9,
            f"{asked}: ranks are idle for {bubble:.0%} of the time, where {least:.0%} will do "
            "(a backward takes as long as two forwards)",
        )
