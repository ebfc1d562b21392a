"""Which of pytest's processes runs which file of tests, with `make test`."""

from itertools import groupby

from xdist.scheduler import LoadFileScheduling

LAST = " last"  # behind the name of a test that is at the end of the run
FEW = 2  # tests that a process has when it gets more
MOST = 25  # tests of a file that a process takes at a time; the last ones to work end together


class WaitingBesideComputing(LoadFileScheduling):
    """The collection begins with files of hurried tests and ends with tests that are quiet or alone
    (`conftest.py`). A hurried test mostly waits, and two of them leave little to a third test
    (`sharing.py`). So the first process takes files from the beginning, and the others take those
    beside it from the other end, a file with many tests in parts. When no file is left, and no
    process has more than its last two tests, all take those at the end one by one: those that are
    quiet run beside each other, and beside nothing else, for which they would wait in turn. They
    begin where a file comes for the second time."""

    def __init__(self, config, log=None):
        super().__init__(config, log)
        self._scopes = {}  # of each test: its file, which part of it, and whether it is last

    def schedule(self):
        seen, is_end = set(), False
        for file, tests in groupby(
            next(iter(self.registered_collections.values())), super()._split_scope
        ):
            is_end = is_end or file in seen
            for n, test in enumerate(tests):
                self._scopes[test] = test + LAST if is_end else f"{file} {n // MOST}"
            seen.add(file)
        super().schedule()

    def _split_scope(self, test):
        return self._scopes[test]

    def _reschedule(self, node):
        """A process keeps its last test until it has another one, or none is left."""
        is_end = self.workqueue and all(scope.endswith(LAST) for scope in self.workqueue)
        if not is_end:
            super()._reschedule(node)
        elif all(self._pending_of(work) <= FEW for work in self.assigned_work.values()):
            for one in self.nodes:
                super()._reschedule(one)

    def _assign_work_unit(self, node):
        files = [scope for scope in self.workqueue if not scope.endswith(LAST)]
        if files and node is not self.nodes[0]:
            self.workqueue.move_to_end(files[-1], last=False)
        super()._assign_work_unit(node)
