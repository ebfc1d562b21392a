"""torch's own distributed tests, over a backend and with a class of DDP of choice.

    python -m tests.conformance --backend gloo --world 2 --all      # what there is
    python -m tests.conformance --backend dpcore --world 4          # what passes with Gloo
    python -m tests.conformance --ddp dpcore --shim --only test_ddp_namedtuple
    python -m tests.conformance --backend gloo --world 8 --all --write   # the lists again

Without --all or --only it runs the tests of the committed list, those that pass with Gloo and
torch's DDP, and its exit status says whether all of them passed but the known differences.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.conformance import suite
from tests.conformance.lists import differences, expected, list_file


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--backend", choices=["gloo", "dpcore"], default="gloo")
    parser.add_argument("--ddp", choices=["torch", "dpcore"], default="torch")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--shim", action="store_true", help="tests for GPUs, run on the CPU")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these tests")
    parser.add_argument("--all", action="store_true", help="every test, expected or not")
    parser.add_argument("--json", type=Path, metavar="FILE", help="verdicts as JSON")
    parser.add_argument("--write", action="store_true", help="make this run the committed list")
    parser.add_argument("--quiet", action="store_true", help="no text of failures")
    return parser.parse_args()


def main() -> int:
    options = parsed()
    case = suite.load(options.backend, options.ddp, options.world, options.shim)
    wanted = expected(options.world, options.shim)
    names = options.only or sorted(wanted)
    if options.all:
        without_shim = expected(options.world, False) if options.shim else set()
        names = [name for name in suite.names_of(case) if name not in without_shim]
    verdicts = []
    for verdict in suite.run(case, names):
        verdicts.append(verdict)
        print(f"{verdict.outcome:8} {verdict.seconds:6.1f} s  {verdict.test}", flush=True)
        if verdict.outcome == "failed" and not options.quiet:
            print(verdict.detail, flush=True)
    passed = {verdict.test for verdict in verdicts if verdict.outcome == "passed"}
    if options.json:
        options.json.write_text(json.dumps([vars(verdict) for verdict in verdicts], indent=1))
    if options.write:
        list_file(options.world, options.shim).write_text("".join(f"{n}\n" for n in sorted(passed)))
        return 0
    known = differences(options.backend, options.ddp)
    missing = sorted((wanted & set(names)) - passed - set(known))
    print(f"{len(passed)} of {len(verdicts)} passed; expected and not passed: {missing or 'none'}")
    return 1 if missing or (options.only and len(passed) < len(verdicts)) else 0


if __name__ == "__main__":
    sys.exit(main())
