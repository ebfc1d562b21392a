"""``dpcore simulate``: how long would a step take over another link, with another schedule?

    network    operations over paced links: the executor and ``link.h`` in plain Python
    gradients  what a step computes, from a trace or a description
    training   gradients become ready, a schedule sends them, somebody waits
    rehearsal  the same with a ``LaunchSchedule`` of your own
    command    ``dpcore simulate``

It needs no compiled core. ``training`` says what it leaves out; a test and a committed table
compare it with runs over emulated links.
"""

from dpcore.tools.simulate.gradients import Gradients, gradients_of
from dpcore.tools.simulate.network import Network, NetworkOperation
from dpcore.tools.simulate.training import Prediction, predict

__all__ = ["Gradients", "Network", "NetworkOperation", "Prediction", "gradients_of", "predict"]
