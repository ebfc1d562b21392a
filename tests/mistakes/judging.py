"""What ranks were told, held against what an exhibit of the museum expects."""

import re

# Errors that tell a mistake, or what it has led to on another rank.
OURS = ("Error", "Mismatch", "PeerLost", "Timeout")


def of(told, *hows):
    """Messages of all ranks, the earliest first."""
    said = [message for rank in told for message in rank if message.how in hows]
    return sorted(said, key=lambda message: message.step)


def has(message, words):
    return all(re.search(word, message.text) for word in words)


def problem(exhibit, told, loud="warn", later=0):
    """What is wrong with it, or "". ``loud``: how a note is told, with ``mistakes="all"`` as a
    warning. ``later``: more steps that ranks may take, where they seldom compare."""
    errors, warned = of(told, "raise"), of(told, "warn")
    repeated = [m.text for rank in told for m in rank if m.how == "warn"]
    if len(repeated) > len(told) * len(set(repeated)):
        return f"said more than once: {repeated}"
    if exhibit.grade == "silent" or (exhibit.grade == "note" and loud == "note"):
        if errors or warned:
            return f"it is not to be told, and was: {(errors + warned)[0]}"
        if exhibit.grade == "silent":
            return ""
    wanted = {
        "note": ("note",) if loud == "note" else ("warn",),
        "warn": ("warn", "raise"),  # a warning that can be proved may be an error
        "raise": ("raise",),
        "already": ("raise",),
    }[exhibit.grade]
    candidates = of(told, *wanted)
    if not candidates:
        return f"nothing was told as a {' or '.join(wanted)}"
    fitting = [message for message in candidates if has(message, exhibit.words)]
    if not fitting:
        return f"no message has all of {exhibit.words}: {candidates}"
    if fitting[0].step > exhibit.by + later:
        return f"told in step {fitting[0].step}, after {exhibit.by + later}: {fitting[0].text}"
    if others := [message for message in errors if message.kind not in OURS]:
        return f"told, and then another error: {others[0]}"
    return ""
