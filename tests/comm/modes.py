"""How the ranks of a test run: what is true of one kind is to be true of all."""

HOW = {
    "threads": {"mode": "threads"},
    "processes": {"mode": "processes"},
    "tcp": {"mode": "processes", "transport": "tcp"},
}
MODES = tuple(HOW)
