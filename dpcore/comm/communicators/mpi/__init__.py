"""An MPI library behind the calls of a communicator."""
