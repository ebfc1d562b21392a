"""``dpcore simulate``: how long would a step take over another link, with another schedule?

    network    operations over paced links: the executor and ``link.h`` in plain Python
    training   gradients become ready, a schedule sends them, somebody waits
    command    ``dpcore simulate``

It needs no compiled core. What it leaves out is told in ``training``; a test and a committed table
hold it against runs over emulated links.
"""

from dpcore.simulate.network import Network, NetworkOperation
from dpcore.simulate.training import Gradients, Prediction, gradients_of, predict

__all__ = ["Gradients", "Network", "NetworkOperation", "Prediction", "gradients_of", "predict"]
