"""One rank of a notebook: a process that runs cells, one after the other, in the same variables.

The main thread runs cells, so that Ctrl-C reaches them. Another one reads the pipe: what may not
wait for the end of a cell (``Abort``) is done there. Between two cells Ctrl-C is ignored.
"""

from __future__ import annotations

import ast
import contextlib
import io
import linecache
import os
import queue
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from dpcore.base import screen
from dpcore.comm.launch import session
from dpcore.errors import Error
from dpcore.school.notebook.messages import Abort, Cell, Done, Meet, Printed, Problem, Shown


def main(pipe: Connection, rank: int, world_size: int, options: Mapping[str, Any]) -> None:
    """What the process runs until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setpgid(0, 0)  # Ctrl-C comes from the notebook, once
    OneRank(pipe, rank, world_size, options).serve()


class OneRank:
    """Its variables, its communicator and its end of the pipe."""

    def __init__(
        self, pipe: Connection, rank: int, world_size: int, options: Mapping[str, Any]
    ) -> None:
        import torch

        import dpcore

        self._pipe, self._rank, self._world_size = pipe, rank, world_size
        self._options = options
        self._sending = threading.Lock()
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._comm: Any = None
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        self._variables = vars(module)
        self._variables.update(
            dp=dpcore, dpcore=dpcore, torch=torch, rank=rank, world_size=world_size
        )
        self._streams = [Lines(self, "stdout"), Lines(self, "stderr")]
        sys.stdout, sys.stderr = self._streams
        screen.other = self._show

    def serve(self) -> None:
        threading.Thread(target=self._listen, name="notebook", daemon=True).start()
        while (asked := self._asked.get()) is not None:
            self.send(self._answer(asked))
        if self._comm is not None:
            with contextlib.suppress(Error):
                session.finalize()

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                asked = self._pipe.recv()
                if isinstance(asked, Abort):
                    with contextlib.suppress(Error):
                        self._comm.abort(asked.reason)
                else:
                    self._asked.put(asked)
        self._asked.put(None)

    def send(self, message: Any) -> None:
        with self._sending, contextlib.suppress(OSError):  # a notebook that is gone hears nothing
            self._pipe.send(message)

    def _show(self, thing: Any) -> None:
        html = html_of(thing)
        if html is not None:
            self.send(Shown(html, repr(thing)))

    def _answer(self, asked: Any) -> Done:
        try:
            if isinstance(asked, Meet):
                self._meet(asked)
                return Done()
            return self._run(asked)
        except BaseException as error:
            return Done(problem_of(error, None), is_usable=False)

    def _meet(self, asked: Meet) -> None:
        if self._comm is not None:
            with contextlib.suppress(Error):
                session.finalize()
        self._comm = session.init(
            rank=self._rank,
            world_size=self._world_size,
            init_method=asked.rendezvous,
            **self._options,
        )
        self._variables["comm"] = self._comm

    # ---- a cell ----------------------------------------------------------------------------------

    def _run(self, cell: Cell) -> Done:
        name = f"<ranks, cell {cell.number}>"
        lines = cell.source.splitlines(keepends=True)
        linecache.cache[name] = (len(cell.source), None, lines, name)
        problem, value = None, None
        try:
            body, last = compiled(cell.source, name)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            exec(body, self._variables)
            if last is not None:
                value = eval(last, self._variables)
            text, html = self._drawn(value)
            values = self._pickled(cell.names)
        except BaseException as error:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            text = html = None
            values = {}
            problem = problem_of(error, name)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            for stream in self._streams:
                stream.end()
        usable = self._comm is not None and not (self._comm.closed or self._comm._native.failed)
        operations = operations_of(self._comm) if usable else {}
        return Done(problem, text, html, values, operations, usable)

    def _pickled(self, names: Sequence[str]) -> dict[str, bytes]:
        import cloudpickle

        missing = [name for name in names if name not in self._variables]
        if missing:
            raise NameError(f"no variable {', '.join(missing)} to bring back")
        return {name: cloudpickle.dumps(self._variables[name]) for name in names}

    def _drawn(self, value: Any) -> tuple[str | None, str | None]:
        if value is None:
            return None, None
        self._variables["_"] = value
        return repr(value), html_of(value) if self._rank == 0 else None


class Lines(io.TextIOBase):
    """A stream of a rank: what is printed goes to the notebook line by line."""

    def __init__(self, rank: OneRank, name: str) -> None:
        self._rank, self._name = rank, name
        self._begun = ""
        self._writing = threading.Lock()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._writing:
            whole, end, self._begun = (self._begun + text).rpartition("\n")
            if end:
                self._rank.send(Printed(self._name, whole + end))
        return len(text)

    def end(self) -> None:
        """Called at the end of a cell: a last line without a newline gets one."""
        if self._begun:
            self.write("\n")


def compiled(source: str, name: str) -> tuple[types.CodeType, types.CodeType | None]:
    """The statements of a cell, and its last expression, whose value is shown. Not with a semicolon
    behind it."""
    tree = ast.parse(source, name)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr) or source.rstrip().endswith(";"):
        return compile(tree, name, "exec"), None
    tree.body.pop()
    return compile(tree, name, "exec"), compile(ast.Expression(last.value), name, "eval")


def problem_of(error: BaseException, cell: str | None) -> Problem:
    """The traceback begins where the cell does."""
    trace = error.__traceback__
    if cell is not None:
        while trace is not None and trace.tb_frame.f_code.co_filename != cell:
            trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    return Problem(type(error).__name__, str(error), text, time.monotonic())


def html_of(value: Any) -> str | None:
    """What a notebook draws of a value, if it can."""
    method = getattr(type(value), "_repr_html_", None)
    return method(value) if method is not None else None


def operations_of(comm: Any) -> dict[str, int]:
    """How many a communicator has run, by name."""
    return {
        name: sum(path["operations"] for path in paths.values())
        for name, paths in comm.stats().items()
        if all(isinstance(path, dict) and "operations" in path for path in paths.values())
    }
