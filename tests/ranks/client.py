"""Asks the server of the tests (`server.py`) for a process that has imported torch.

`python.py` also writes this file into a folder of its own, as a program named `python`. Whoever
starts that one in the place of Python, as launchers do, gets such a process: with its arguments,
environment, folder, descriptors, processors and network, and a parent that passes signals on and
ends as it ends. What is no program, script or module (`python -S ...`) is left to Python itself.
"""

import contextlib
import json
import os
import resource
import select
import signal
import socket
import sys

NAMESPACES = ("net", "uts")  # the network, and the name of the host
_PASSED_ON = {
    getattr(signal, f"SIG{name}")
    for name in ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "ALRM", "CONT")
}


def ask(address, words, descriptors, environment, folder, network="", **more):
    """The number of a process that runs `python WORDS`, and a connection that tells how it ends.
    The process is killed when that one is closed before. ``descriptors``: what it has for which.
    ``network``: a network namespace, by its name."""
    request = {
        "words": words,
        "environment": environment,
        "folder": folder,
        "processors": sorted(os.sched_getaffinity(0)),
        "descriptors": list(descriptors),
        **more,
    }
    paths = [f"/proc/self/ns/{kind}" for kind in NAMESPACES]
    if network:
        paths[0] = f"/run/netns/{network}"
    spaces = [os.open(path, os.O_RDONLY) for path in paths]
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        line.connect(address)
        sent = [*spaces, *descriptors.values()]
        socket.send_fds(line, [json.dumps(request).encode()], sent)
        return int(line.recv(100)), line
    except BaseException:
        line.close()
        raise
    finally:
        for space in spaces:
            os.close(space)


def _inherited():
    """The open descriptors that this program was given, the line to its launcher among them."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.get_inheritable(int(name)):
                found.append(int(name))
        except OSError:
            continue  # of this listing
    return found


def main():
    words = sys.argv[1:]
    unbuffered = words[:1] == ["-u"]
    program = words[unbuffered:]
    if not program or (program[0].startswith("-") and program[0] not in ("-c", "-m")):
        os.execv(sys.executable, [sys.executable, *words])
    own = os.path.realpath(__file__)
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)  # until it is known to whom
    process, line = ask(
        os.path.join(os.path.dirname(own), "server"),
        program,
        {number: number for number in _inherited()},
        dict(os.environ),
        os.getcwd(),
        executable=own,
        unbuffered=unbuffered,
    )

    def pass_on(number, _):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)  # a signal that comes just before `select` ends it as well
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    for number in _inherited():
        if number > 2:
            os.close(number)  # or nobody would see its other end close
    ready = []
    while line not in ready:
        ready, _, _ = select.select([line, woken], [], [])
        if woken in ready:
            os.read(woken, 100)
    status = int(line.recv(100) or signal.SIGKILL)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main()
