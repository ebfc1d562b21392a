"""Operations of black boxes in words, as the core's own messages write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def describe(entry: Mapping[str, Any]) -> str:
    """
    >>> describe({"number": 7, "collective": "all_reduce", "count": 3, "dtype": "f32", "op": "max"})
    'operation 7 (all_reduce of 3 x f32, max)'
    """
    text = f"operation {entry['number']} ({entry['collective']}"
    if "count" in entry:
        text += f" of {entry['count']} x {entry['dtype']}"
    if "op" in entry:
        text += f", {entry['op']}"
    if "root" in entry:
        text += f", root {entry['root']}"
    return text + ")"


def describe_message(message: Mapping[str, Any], members: Mapping[int, int]) -> str:
    """``members``: by rank in the group, the rank that is to be named.

    >>> wait = {"direction": "recv", "peer": 1, "tag": 5, "bytes": 12}
    >>> describe_message(wait, {0: 4, 1: 6})
    'recv of 12 bytes from rank 6 (tag 5)'
    """
    peer = message["peer"]
    other = "any rank" if peer < 0 else f"rank {members.get(peer, peer)}"
    way = "to" if message["direction"] == "send" else "from"
    return (
        f"{message['direction']} of {message['bytes']} bytes {way} {other} (tag {message['tag']})"
    )
