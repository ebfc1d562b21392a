"""Measures several communication libraries side by side, interleaved, in one run.

Reading order: cells (what is measured), loop (how), group (the ranks that measure), interleave
(in which order), summary (what the seconds mean), table, plot and records (where they go), options
and session (the scripts).
This package imports nothing heavy, since the ranks of the MPI environments import it too.
"""
