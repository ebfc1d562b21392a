"""What IPython sees of it: the magic ``ranks``, for cells and for lines.

%load_ext dpcore

%%ranks 4
x = torch.full((3,), float(rank))
comm.all_reduce(x)
x
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import pickle
import shlex
import sys
from collections import Counter
from typing import Any, NoReturn

from dpcore.school.notebook.messages import Done, Printed, Shown
from dpcore.school.notebook.pool import RankPool
from dpcore.tools.argument_types import seconds

_HELP = """\
%%ranks [N] [--link WORDS] [--timeout SECONDS] [--get NAMES]   runs the cell on N ranks
%ranks                       which ranks there are
%ranks N                     starts N ranks, if there are not as many
%ranks restart               ends them and starts as many new ones
%ranks stop                  ends them

N is needed for the first cell only. Ranks live on, with their variables, until they are stopped or
another N, --link or --timeout is asked for; what is left out stays as it was. Each has dp, torch,
rank, world_size and comm.
"""


class _Parser(argparse.ArgumentParser):
    """One that raises what IPython shows without a traceback."""

    def error(self, message: str) -> NoReturn:
        from IPython.core.error import UsageError

        raise UsageError(f"ranks: {message}\n{_HELP}")


def _parser() -> _Parser:
    made = _Parser(prog="%%ranks", add_help=False)
    made.add_argument("what", nargs="?", default="")
    made.add_argument("--link")
    made.add_argument("--timeout", type=seconds)
    made.add_argument("--get", default="")
    return made


class Ranks:
    """The magic, and the ranks of this notebook."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._pool: RankPool | None = None
        atexit.register(self.stop)

    def __call__(self, line: str, cell: str | None = None) -> None:
        """See ``_HELP``."""
        parser = _parser()
        try:
            words = shlex.split(line)
        except ValueError as problem:
            parser.error(str(problem))
        asked = parser.parse_args(words)
        if cell is None and asked.what in ("", "stop", "restart", "help"):
            self._manage(asked.what, parser)
            return
        if asked.what and not (asked.what.isdecimal() and 1 <= int(asked.what) <= 64):
            parser.error(f"{asked.what!r} is not a number of ranks from 1 to 64")
        names = tuple(asked.get.replace(",", " ").split())
        if bad := [name for name in names if not name.isidentifier()]:
            parser.error(f"--get {' '.join(bad)}: names of variables are needed")
        options = {"link": asked.link, "timeout": asked.timeout}
        pool = self._ranks(
            int(asked.what or 0), {k: v for k, v in options.items() if v is not None}, parser
        )
        if cell is None:
            print(self._state())
            return
        ended = pool.run(cell, names)
        self._draw(ended)
        values = [{n: pickle.loads(of) for n, of in done.values.items()} for done in ended]
        self._shell.push({name: [of_rank[name] for of_rank in values] for name in names})

    def _manage(self, what: str, parser: _Parser) -> None:
        if what == "help":
            print(_HELP)
            return
        pool = self._pool
        if what == "restart" and pool is None:
            parser.error("there are no ranks yet; %ranks 4 starts four")
        if what in ("stop", "restart"):
            self.stop()
        if what == "restart" and pool is not None:
            self._pool = RankPool(pool.world_size, self._hear, pool.options)
        print(self._state())

    def _state(self) -> str:
        if self._pool is None or not self._pool.is_alive:
            return "no ranks; %%ranks 4 starts four"
        numbers = ", ".join(map(str, self._pool.processes))
        count = self._pool.world_size
        return f"{count} rank{'s' if count > 1 else ''}, processes {numbers}"

    def _ranks(self, count: int, options: dict[str, Any], parser: _Parser) -> RankPool:
        pool = self._pool
        if pool is not None and not pool.is_alive:
            pool.close()
            self._pool = None
        if pool is None and not count:
            parser.error("how many? %%ranks 4")
        if pool is not None:
            count = count or pool.world_size
            options = pool.options | options
            if self._pool is pool and (count, options) == (pool.world_size, pool.options):
                return pool
            if self._pool is pool:
                print(f"ends {pool.world_size} ranks and their variables", file=sys.stderr)
        self.stop()
        self._pool = RankPool(count, self._hear, options)
        return self._pool

    def stop(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    # ---- what they say ---------------------------------------------------------------------------

    def _hear(self, rank: int, message: Any) -> None:
        if isinstance(message, Printed):
            stream = sys.stdout if message.stream == "stdout" else sys.stderr
            for line in message.text.splitlines():
                stream.write(f"[{rank}] {line}\n")
            stream.flush()
        elif isinstance(message, Shown):
            self._show_html(message.html, f"[{rank}] {message.text}")

    def _draw(self, ended: list[Done]) -> None:
        """The value of the last expression: once, where it is the same on all ranks."""
        texts = [done.text for done in ended]
        first = ended[0]
        if first.html is not None:
            self._show_html(first.html, f"[0] {first.text}")
            return
        if len(Counter(texts)) == 1 and len(texts) > 1:
            if texts[0] is not None:
                print(f"[all] {texts[0]}")
            return
        for rank, text in enumerate(texts):
            if text is not None:
                print(f"[{rank}] {text}")

    @staticmethod
    def _show_html(html: str, text: str) -> None:
        display: Any = importlib.import_module("IPython.display")

        display.display({"text/html": html, "text/plain": text}, raw=True)


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext dpcore``."""
    shell.register_magic_function(Ranks(shell), magic_kind="line_cell", magic_name="ranks")


def unload_ipython_extension(shell: Any) -> None:
    """``%unload_ext dpcore``: ends the ranks."""
    for kind in ("line", "cell"):
        ranks = shell.magics_manager.magics[kind].pop("ranks", None)
        if isinstance(ranks, Ranks):
            ranks.stop()
            atexit.unregister(ranks.stop)
