"""dpcore beside others: contenders take turns in one run, so that a busy minute falls on all alike.

``dpcore compare`` and the scripts in benchmarks/ of the checkout are made of it. Importing this
package loads nothing heavy: ranks of an MPI that has an environment without torch import it too.
"""
