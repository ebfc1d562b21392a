"""What an MPI library calls itself. Imports nothing: an MPI may have an environment of its own."""

from __future__ import annotations


def library_name(said: str) -> str:
    """From the text of ``MPI.Get_library_version()``, which each library writes in its own way.

    >>> library_name("Open MPI v5.0.11, package: Open MPI root@host, ident: 5.0.11")
    'Open MPI v5.0.11'
    >>> library_name("MPICH Version:      5.0.2\\nMPICH ABI: 17")
    'MPICH 5.0.2'
    """
    first = said.splitlines()[0].split(",")[0]
    return " ".join(first.replace("Version:", "").rstrip("\0").split())
