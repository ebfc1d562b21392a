"""The command line, called in the process of the test."""

from dpcore.__main__ import main


def status_of(*arguments):
    """The exit status. argparse leaves with an exception."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as ended:
        return ended.code
