"""The handle of an operation that was started with ``async_op=True``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpcore import errors

if TYPE_CHECKING:
    import torch

    from dpcore import _C

# Ten days, for those who cannot wait for ever: stores, sockets and torch count in milliseconds.
LONGEST_SECONDS = 864_000.0


class Work:
    """An operation in flight. Its tensors belong to the operation until it is complete.

    >>> work = comm.all_reduce(gradient, op="mean", async_op=True)   # doctest: +SKIP
    >>> work.wait()                                                  # doctest: +SKIP
    """

    def __init__(self, native: _C.Work, result: list[Any]) -> None:
        self._native = native
        self._result = result
        self._future: torch.futures.Future[list[Any]] | None = None

    def wait(self, timeout: float | None = None) -> None:
        """Returns when the operation is complete; raises what went wrong.

        A thread that waits executes the operation itself as far as it can. ``timeout`` (seconds)
        raises ``Timeout`` and, since the operation cannot be taken back, breaks the communicator.
        """
        self._native.wait(0.0 if timeout is None else timeout)

    def is_completed(self) -> bool:
        """Whether ``wait`` would return (or raise) at once."""
        return self._native.is_completed()

    @property
    def source(self) -> int | None:
        """The other rank of a message, once it is known."""
        return self._native.source

    def exception(self) -> errors.Error | None:
        """The error of an operation that failed, otherwise None."""
        failure = self._native.failure()
        return None if failure is None else errors.error_of(failure)

    def get_future(self) -> torch.futures.Future[list[Any]]:
        """A torch future whose value is the list of result tensors.

        What is attached to it runs on a thread of its own and may do whatever the program does,
        other operations and waits included; callbacks of several futures may run side by side.
        Where the operation is complete already, they run on the thread that attaches them.

        On a GPU the future is complete at once, as torch's of NCCL are: the code that waits for it
        makes the current stream wait for the result.
        """
        import torch

        if self._future is not None:
            return self._future
        gpu = next((t.device for t in self._result if getattr(t, "is_cuda", False)), None)
        future: torch.futures.Future[list[Any]] = torch.futures.Future(
            devices=None if gpu is None else [gpu]
        )

        def finish() -> None:
            error = self.exception()
            if error is None:
                future.set_result(self._result)
            else:
                future.set_exception(error)  # type: ignore[arg-type]  # torch's own stub is wrong

        if gpu is None:
            self._native.when_complete(finish)
        else:
            with torch.cuda.stream(torch.cuda.Stream(gpu)):  # type: ignore[no-untyped-call]
                self.wait()
                future.set_result(self._result)
        self._future = future  # not before: what raises can be tried again
        return future

    def __repr__(self) -> str:
        state = "complete" if self.is_completed() else "in flight"
        return f"<Work: {self._native.describe()}, {state}>"
