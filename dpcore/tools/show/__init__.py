"""``dpcore show``: a trace as a page, a picture and tables.

    run        what the ranks of a run did
    reading    the file of ``dpcore.trace`` back into events, per rank
    profiles   files of torch's profiler, one per rank, as runs
    figures    the numbers: exposed, in flight, overlap, steps, operations, waits
    buckets    when a bucket filled, waited and travelled
    columns    the events of a lane as compact columns for the page
    schedules  the moves and values that the stepper of the page draws
    moves      an algorithm by its name, to be stepped through without a trace
    page       one self-contained HTML file of all that
    picture    the same lanes as a PNG
    tables     the same numbers in the terminal
    rows       the same numbers as CSV, a row per bucket
    kineto     a run as files of torch's profiler, for other tools
    command    ``dpcore show``

Nothing here needs the compiled core, torch or Linux: a trace can be looked at anywhere.
"""

from dpcore.tools.show.figures import RankFigures, RunFigures, figures_of
from dpcore.tools.show.page import write_page
from dpcore.tools.show.picture import write_picture
from dpcore.tools.show.reading import read_run
from dpcore.tools.show.run import RankEvents, Run

__all__ = [
    "RankEvents",
    "RankFigures",
    "Run",
    "RunFigures",
    "figures_of",
    "read_run",
    "write_page",
    "write_picture",
]
