"""What every room may use: files, names of the machine, markup, code of the user."""
