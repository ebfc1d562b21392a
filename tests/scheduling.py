"""Which of pytest's processes runs which file of tests, with `make test`."""

from xdist.scheduler import LoadFileScheduling

WAITING = "tests/faults/"


class WaitingBesideComputing(LoadFileScheduling):
    """The first process takes the files of faults before all others. Their tests mostly wait, and
    two of them leave no share to a third test (`sharing.py`): at the end of a run, one after the
    other, they would leave the processors idle."""

    def _assign_work_unit(self, node):
        waiting = [file for file in self.workqueue if file.startswith(WAITING)]
        if waiting and node is self.nodes[0]:
            longest = max(waiting, key=lambda file: len(self.workqueue[file]))
            self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)
