"""A pipeline's plan (25 minutes)

A model is cut into stages, and each rank has one of them. A batch is cut into micro-batches, which
go through the stages one behind the other: forward from the first to the last, and backward the
other way. A plan says in which order each rank runs its passes. Yours is 1F1B:

* At first, stage s of S runs the forwards of S - 1 - s micro-batches: as many as can be on their
  way between here and the last stage. So the last stage runs none, and the first one S - 1.
* Then it runs one forward and one backward in turns, until there is no forward left.
* At last it runs the backwards that are left.

Forwards and backwards go from micro-batch 0 upwards. With 2 stages and 3 micro-batches, the plan is

    stage 0: F0 F1 B0 F2 B1 B2
    stage 1: F0 B0 F1 B1 F2 B2

There may be fewer micro-batches than stages. docs/learn/17-a-model-in-stages.md says how long ranks
wait under a plan, and what they have to keep.
"""


def plan(stages, microbatches):
    """A list for each stage of its passes in their order: ("F", 3) is the forward of micro-batch 3,
    and ("B", 3) its backward."""
    #: solution
    rows = []
    for stage in range(stages):
        early = min(stages - 1 - stage, microbatches)
        row = [("F", m) for m in range(early)]
        for m in range(early, microbatches):
            row += [("F", m), ("B", m - early)]
        row += [("B", m) for m in range(microbatches - early, microbatches)]
        rows.append(row)
    return rows
    #: instead
    #| raise NotImplementedError("who runs what, in which order?")
    #: end


#: hint
#| Write the rows of 3 stages and 4 micro-batches on paper first: the last stage, then the others.
#: hint
#| When stage s runs forward m in the turns, it runs backward m - (S - 1 - s) behind it.
#: hint
#| `min(stages - 1 - stage, microbatches)` forwards come first, and as many backwards at last.
#: end
