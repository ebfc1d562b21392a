"""The command line: one folder per job, and what the commands share."""
