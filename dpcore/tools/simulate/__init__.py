"""``dpcore simulate``: how long would a step take over another link, with another schedule?

    links       what connects ranks: a speed, one per pair, or hosts that share cards and switches
    cards       network cards: ``link.h`` in plain Python, and what real networks add to it
    choice      which algorithm an operation runs: ``cost.cpp`` and ``choice.cpp`` in plain Python
    lanes       from the moves of an algorithm to what each rank does with each chunk
    network     operations over the cards: the executor in plain Python
    processors  what that costs processors, and how threads share their cores
    in_memory   operations among ranks that share memory: no message, only processors
    classes     one rank that stands for all, where all do the same
    shapes      what such a rank sends: algorithms as rounds of messages
    calibration  what ``dpcore calibrate`` has measured, as processors and links
    gradients   what a step computes, from a trace or a description
    ranks       steps one after the other: forward, backward, the optimizer, and a launch schedule
    control     a step's buckets: what the schedule calls
    heard, plan, turns   the schedule of a rank, what ranks have in common, a thread for each
    local_updates        ranks that agree every so many steps
    stragglers  ranks that compute longer
    training    from gradients, a link and a schedule to the time of a step
    questions   what is best, how many ranks pay, how sure a prediction is
    residuals   by how much predictions were off, and calibrations apart
    recording   a prediction as a trace, and the page that dpcore show makes of one
    plot        a page: a step against bandwidth, ranks and the size of buckets
    command     ``dpcore simulate``

It needs no compiled core. ``training`` says what it leaves out; a test and a committed table
compare it with runs over emulated links.
"""

from dpcore.tools.simulate.gradients import Gradients, gradients_of
from dpcore.tools.simulate.links import Links
from dpcore.tools.simulate.local_updates import LocalUpdates
from dpcore.tools.simulate.network import Network, NetworkOperation
from dpcore.tools.simulate.plan import Hook
from dpcore.tools.simulate.processors import Processors
from dpcore.tools.simulate.stragglers import Stragglers
from dpcore.tools.simulate.training import Prediction, predict

__all__ = [
    "Gradients",
    "Hook",
    "Links",
    "LocalUpdates",
    "Network",
    "NetworkOperation",
    "Prediction",
    "Processors",
    "Stragglers",
    "gradients_of",
    "predict",
]
