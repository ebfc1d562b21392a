"""Which of pytest's processes runs which file of tests, with `make test`."""

from itertools import groupby

from xdist.scheduler import LoadFileScheduling

LAST = " last"  # behind a file's name: those of its tests that are at the end of the run
MOST = 25  # tests of a file that a process takes at a time; the last ones to work end together


class WaitingBesideComputing(LoadFileScheduling):
    """The collection begins with files of hurried tests and ends with tests that are quiet or alone
    (`conftest.py`). A hurried test mostly waits, and two of them leave little to a third test
    (`sharing.py`). So the first process takes files from the beginning, and the others take those
    beside it from the other end, a file with many tests in parts. When no file is left, all take
    those last tests."""

    def __init__(self, config, log=None):
        super().__init__(config, log)
        self._scopes = {}  # of each test: its file, which part of it, and whether it is last

    def schedule(self):
        seen = set()
        for file, tests in groupby(
            next(iter(self.registered_collections.values())), super()._split_scope
        ):
            end = LAST if file in seen else ""
            self._scopes |= {test: f"{file} {n // MOST}{end}" for n, test in enumerate(tests)}
            seen.add(file)
        super().schedule()

    def _split_scope(self, test):
        return self._scopes[test]

    def _assign_work_unit(self, node):
        files = [scope for scope in self.workqueue if not scope.endswith(LAST)]
        if files and node is not self.nodes[0]:
            self.workqueue.move_to_end(files[-1], last=False)
        super()._assign_work_unit(node)
