"""Entry of every rank: `python start.py GROUP JOB WORLD RANK` (RANK is -1 under mpiexec).

A file to be run by path, since an MPI environment has no package of ours installed. The checkout
goes to the end of the search path: where dpcore is installed, the installed one is measured.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    del sys.path[0]  # this folder: its file names would shadow packages
    sys.path.append(str(Path(__file__).resolve().parents[5]))
    from dpcore.tools.compare.collectives.workers.backend import Place
    from dpcore.tools.compare.collectives.workers.serve import serve

    group, job, world, rank = sys.argv[1:5]
    serve(Place(group=group, rank=int(rank), world=int(world), job=job))


if __name__ == "__main__":
    main()
