"""Files that ``dpcore show`` and ``dpcore simulate`` may be given, and that are not what they take:
written by hand, and made of good ones by random changes of their structure."""

from __future__ import annotations

import copy
import gzip
import json
import os
import random

from tests.show import profiles
from tests.show.traces import write_trace

DEEP = 100_000
DESCRIPTION = {
    "forward_ms": 1, "backward_ms": 9, "gradients": [{"bytes": 4096, "ready_ms": 2.5}] * 3,
}  # fmt: skip
# What may stand where something else was.
ODD_VALUES = [
    None, True, False, "", "x", "\ud800", -1, 0, 1, 2**62, 2**64, -(2**63), 10**400, 0.5, -0.5,
    float("nan"), float("inf"), float("-inf"), 1e308, [], {}, [[]], [{}], {"": []}, [1, "a", None],
    "9" * 5000 + "F0", "block " + "9" * 5000, "ProfilerStep#" + "9" * 5000,
]  # fmt: skip


def good_contents(folder):
    """Of a trace of dpcore, files of torch's profiler of a GPU and of Gloo, and a description."""
    trace = json.loads(write_trace(folder / "good.json", steps=2).read_text())
    gpu = json.loads(profiles.write(folder / "gpu.json", profiles.gpu_steps(2)).read_text())
    gloo = json.loads(profiles.GLOO[0].read_text())
    gloo["traceEvents"] = gloo["traceEvents"][:300]
    return {"trace": trace, "gpu": gpu, "gloo": gloo, "description": DESCRIPTION}


def written(content):
    """Texts that ``json.dumps`` cannot be talked into are written by hand."""
    return json.dumps(content).encode("utf-8", "replace")


def deep(inner="", begin="[", end="]", depth=DEEP):
    return begin * depth + inner + end * depth


def raw_files(trace):
    """Name and bytes of files that are odd as a whole. ``trace``: the content of a good one."""
    good = written(trace)
    event = next(e for e in trace["traceEvents"] if e.get("cat") == "operation")
    in_event = json.dumps({**trace, "traceEvents": [{**event, "args": {"x": "HERE"}}]})
    whole = {
        "empty": b"", "blank": b" \n", "zeros": bytes(64), "binary": bytes(range(256)) * 8,
        "bom": b"\xef\xbb\xbf" + good, "utf16": good.decode().encode("utf-16"),
        "cut": good[: len(good) // 2], "cut by one": good[:-1], "twice": good + good,
        "gzip of nothing": gzip.compress(b"", mtime=0), "gzip": gzip.compress(b"junk", mtime=0),
        "cut gzip": gzip.compress(good, mtime=0)[:-20], "gzip's two bytes": b"\x1f\x8b",
        "damaged gzip": gzip.compress(good, mtime=0)[:30] + b"x" * 200,
        "deep lists": deep().encode(), "deep objects": deep("1", '{"a":', "}").encode(),
        "deep in an event": in_event.replace('"HERE"', deep()).encode(),
        "not so deep": in_event.replace('"HERE"', deep(depth=900)).encode(),
        "open lists": b"[" * DEEP, "many digits": b"9" * 5000,
        "many digits in an event": in_event.replace('"HERE"', "9" * 5000).encode(),
        "text": b"hello", "comment": b"// none\n{}", "html": b"<html></html>",
    }  # fmt: skip
    texts = [
        "null", "true", "3", "1e999", "NaN", '"a"', "[]", "[[]]", "[{}]", "{}", '{"a": 1}',
        '{"traceEvents":[{}]}', '{"traceEvents":[]}', '{"traceEvents":{}}', '{"traceEvents":null}',
        '{"otherData":{"program":"dpcore"}}', '{"otherData":[]}', '{"otherData":null}',
        '{"schemaVersion":1}', '{"schemaVersion":1,"traceEvents":[]}', '{"gradients":[]}',
        '{"schemaVersion":1,"traceEvents":[null]}', '{"gradients":null}', '{"gradients":[{}]}',
        '{"traceEvents":[{"cat":["kernel"]}]}', '{"traceEvents":[{"cat":"kernel","ph":"X"}]}',
        '{"forward_ms":1,"backward_ms":1,"gradients":[]}',
    ]  # fmt: skip
    of_dpcore = '{"otherData":{"program":"dpcore"},"traceEvents":%s}'
    entries = ["[]", "[{}]", "{}", "null", "[null]", "[1]", '[{"cat":"operation"}]']
    whole |= {text: text.encode() for text in [*texts, *(of_dpcore % e for e in entries)]}
    return whole.items()


def changed_fields(trace):
    """Name and content for each odd value in each field of an operation, and of the rest."""
    number = next(
        n for n, e in enumerate(trace["traceEvents"]) if e.get("cat") == "operation" and e["args"]
    )
    event = trace["traceEvents"][number]
    places = [
        *(("traceEvents", number, name) for name in event),
        *(("traceEvents", number, "args", name) for name in event["args"]),
        *(("otherData", name) for name in trace["otherData"]),
        *(("otherData", "models", 0, name) for name in trace["otherData"]["models"][0]),
        *(("distributedInfo", name) for name in trace["distributedInfo"]),
    ]
    for place in places:
        for value in ("MISSING", -5, 2**63, 1e999, float("nan"), None, "a", {}, [None]):
            content = copy.deepcopy(trace)
            *path, last = place
            parent = content
            for step in path:
                parent = parent[step]
            if value == "MISSING":
                del parent[last]
            else:
                parent[last] = value
            yield f"{'.'.join(map(str, place))} = {value}", content


def mutated(content, seed):
    """A copy with one to three changes at places that the seed chooses."""
    chance = random.Random(seed)
    content = copy.deepcopy(content)
    for _ in range(chance.randint(1, 3)):
        parents = list(_containers(content))
        parent = chance.choice(parents)
        if not parent:
            continue
        keys = list(parent) if isinstance(parent, dict) else range(len(parent))
        key = chance.choice(list(keys))
        act = chance.random()
        if act < 0.55:
            parent[key] = chance.choice(ODD_VALUES)
        elif act < 0.7:
            del parent[key]
        elif act < 0.85:  # what stands elsewhere
            other = chance.choice(parents)
            parent[key] = copy.deepcopy(chance.choice([other, *_values(other)]))
        elif isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        else:
            parent[chance.choice(["ts", "dur", "pid", "args", "x"])] = parent[key]
    return content


def _containers(content):
    yield content
    for value in _values(content):
        if isinstance(value, dict | list):
            yield from _containers(value)


def _values(container):
    return list(container.values()) if isinstance(container, dict) else list(container)


def special_paths(folder):
    """Name and path of what is no regular file."""
    (folder / "a folder").mkdir()
    (folder / "to nothing.json").symlink_to(folder / "nothing")
    (folder / "to itself.json").symlink_to(folder / "to itself.json")
    (folder / "foreign").mkdir()
    (folder / "foreign" / "package.json").write_text('{"name": "a"}')
    (folder / "foreign" / "folder.json").mkdir()
    (folder / "foreign" / "broken.json").write_text("{")
    names = ["missing.json", "a folder", "to nothing.json", "to itself.json", "foreign", "x" * 300]
    paths = [folder / name for name in names]
    return [*paths, folder / "a folder" / "..", "", ".", "/dev/null", os.devnull + "/x", "a\0b"]
