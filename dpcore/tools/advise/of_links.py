"""Causes that lie in how bytes travel: a slow link, messages that wait, and a GPU that does."""

from __future__ import annotations

from collections import Counter

from dpcore.tools.advise.evidence import Evidence, Step
from dpcore.tools.advise.finding import Finding, shown
from dpcore.tools.advise.of_buckets import waits_ms

MIB = 1 << 20
_LEAST_BYTES = 1 << 20  # smaller messages say more about latency than about the rate
_SMALL_BYTES = 64 << 10
_SLOW = 30e6  # bytes per second, twice what 100 Mbit/s carry
_SLOW_NCCL = 150e6  # what 1 Gbit/s carry, and more
_WORTH = 0.1
_EXPECTED = {"gloo": 117e6, "nccl": 1.17e9}  # bytes per second: 1 and 10 Gbit/s
_SLOW_MESSAGE_MS = 3.0
_LEAST_MESSAGES = 6
_IDLE = 0.03
_MUCH_EXPOSED = 0.2


def rate_of(e: Evidence) -> float:
    """Bytes per second that a rank sends, in the quickest bucket of all; 0 if none is large. Other
    programs make buckets slower and nothing makes them faster, so this is the link's."""
    if e.world < 2:
        return 0.0
    share = 2 * (e.world - 1) / e.world
    rates = [
        bucket.bytes * share / bucket.wire_ms * 1e3
        for steps in e.ranks
        for step in steps
        for bucket in step.buckets
        if bucket.bytes >= _LEAST_BYTES and bucket.wire_ms > 0
    ]
    return max(rates, default=0.0)


def slow_link(e: Evidence, expected: float = 0.0) -> Finding | None:
    """``expected``: bytes per second that the user says the link has."""
    rate = rate_of(e)
    waits = waits_ms(e)
    if not rate or e.link or not e.all_ranks or waits < _WORTH * e.step_ms:
        return None
    on_gpus = e.library == "nccl"
    least = expected / 2 if expected else _SLOW_NCCL if on_gpus else _SLOW
    if rate >= least:
        return None
    should = expected or _EXPECTED["nccl" if on_gpus else "gloo"]
    name = "NCCL_SOCKET_IFNAME" if on_gpus else "GLOO_SOCKET_IFNAME"
    if not e.of_torch:
        name = "DPCORE_SOCKET_IFNAME"
    where = (
        "Ranks share a host, and their bytes still go over a slow interface"
        if e.hosts == 1 and e.of_torch
        else "The link is slower than networks of today are"
    )
    if expected:
        where = "The link carries less than half of what it should"
    return Finding(
        cause="slow link",
        says=f"{where}: a wrong interface, or a limit on it.",
        evidence=(
            f"the quickest bucket travels at {_rate(rate)} in each direction"
            + (f", and the link should carry {_rate(expected)}" if expected else "")
            + f"; {shown(waits)} ms of a step of {shown(e.step_ms)} ms are exposed"
        ),
        high_ms=waits * (1 - rate / should),
        why=f"at {_rate(should)}",
        change=(
            f"{name}=<the fast interface> on every rank (ip -br addr lists them, ip route get "
            "<address of another rank> says which one is taken, ethtool <interface> its speed)"
        ),
    )


def slow_messages(e: Evidence) -> Finding | None:
    """Small messages take milliseconds."""
    small = [
        bucket.wire_ms
        for steps in e.ranks
        for step in steps
        for bucket in step.buckets
        if 0 < bucket.bytes <= _SMALL_BYTES and bucket.wire_ms > 0
    ]
    if len(small) < _LEAST_MESSAGES or e.link or not e.all_ranks or e.world < 2:
        return None
    least = min(small)
    waits = waits_ms(e)
    if least < _SLOW_MESSAGE_MS or waits < _WORTH * e.step_ms:
        return None
    count = len(small) / sum(len(steps) for steps in e.ranks)
    return Finding(
        cause="latency",
        says="Even small messages take milliseconds.",
        evidence=(
            f"the quickest of {len(small)} buckets of at most {_SMALL_BYTES >> 10} KiB takes "
            f"{shown(least)} ms; {shown(waits)} ms of a step are exposed"
        ),
        high_ms=min(waits, count * least),
        why="if these took no time",
        change=(
            "ping <address of another rank>: if it is as slow, it is the network; 40 ms are "
            "delayed acknowledgements (a proxy or tunnel without TCP_NODELAY), and a VPN or "
            "another region can't be made faster: send fewer, larger buckets"
        ),
    )


def syncs(e: Evidence) -> Finding | None:
    """The GPU runs out of work, since the host waits for it."""
    if not e.count or not e.on_gpu:
        return None
    ms = e.median(lambda step: sum(idle for idle, _ in step.idle))
    if ms < _IDLE * e.step_ms or ms <= 0:
        return None
    calls: Counter[str] = Counter()
    for steps in e.ranks:
        for step in steps:
            for idle, what in step.idle:
                calls[what] += round(idle * 1e6)
    (what, _), *_ = calls.most_common(1)
    count = e.median(lambda step: len(step.idle))
    change = {
        ".item()": "keep the value on the GPU (total += loss.detach()), and call .item() every "
        "hundredth step",
        ".cpu()": "copy with .to('cpu', non_blocking=True) into pinned memory, or every hundredth "
        "step only",
        "nonzero()": "replace indexing with a mask by torch.where, or give nonzero_static a size",
        "a tensor as a condition": "replace `if tensor:` by torch.where, or decide on the host",
    }.get(what, "take it out of the step: nothing on the host needs the result at once")
    return Finding(
        cause="GPU-CPU synchronisation",
        says=f"The host waits for the GPU in a step ({what}), which then has nothing to do.",
        evidence=(
            f"after {count:.0f} such waits in a step the GPU is idle for {shown(ms)} ms of "
            f"{shown(e.step_ms)} ms; most of it after {what}"
        ),
        high_ms=ms,
        why="all of this idle time",
        change=change,
    )


def half_the_bytes(e: Evidence) -> Finding | None:
    """What is left if nothing is wrong: send less."""
    waits = waits_ms(e)
    if not e.count or not e.all_ranks or not e.of_torch or waits < _MUCH_EXPOSED * e.step_ms:
        return None
    if not rate_of(e):  # latency does not depend on bytes
        return None
    flight = e.median(_on_the_link)
    high = min(waits, flight / 2)
    if high < _WORTH * e.step_ms:
        return None
    bf16 = e.library == "nccl"
    kind = "bf16" if bf16 else "fp16"
    hook = (
        "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks; "
        f"model.register_comm_hook(None, default_hooks.{kind}_compress_hook)"
    )
    return Finding(
        cause="bytes",
        says=f"Gradients could travel as {kind}, half as many bytes. It rounds them.",
        evidence=(
            f"buckets travel for {shown(flight)} ms of a step, and {shown(waits)} ms are exposed"
        ),
        high_ms=high,
        why="half of the time in which buckets travel",
        change=hook,
        trades=True,
    )


def _on_the_link(step: Step) -> float:
    return min(step.flight_ms, sum(bucket.wire_ms for bucket in step.buckets))


def _rate(bytes_per_second: float) -> str:
    bits = bytes_per_second * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
