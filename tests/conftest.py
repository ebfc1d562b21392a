"""What holds for every test."""

import signal

# Started in the background by a shell, a program ignores Ctrl-C and so do its children: the tests
# of what Ctrl-C does would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
