"""Small plans in the words of MSCCLang and of mscclpp."""

import json


def step(number, kind, *, src=("i", 0), dst=("i", 0), cnt=1, after=(-1, -1)):
    return (
        f'<step s="{number}" type="{kind}" srcbuf="{src[0]}" srcoff="{src[1]}" dstbuf="{dst[0]}" '
        f'dstoff="{dst[1]}" cnt="{cnt}" depid="{after[0]}" deps="{after[1]}" hasdep="0"/>'
    )


def xml(coll, chunks, gpus, in_place=1, scratch=0):
    """``gpus``: for each a list of (send, recv, steps)."""
    lines = [
        f'<algo name="mine" proto="Simple" nchannels="1" nchunksperloop="{chunks}" '
        f'ngpus="{len(gpus)}" coll="{coll}" inplace="{in_place}">'
    ]
    for rank, blocks in enumerate(gpus):
        lines.append(f'<gpu id="{rank}" i_chunks="0" o_chunks="0" s_chunks="{scratch}">')
        for number, (send, recv, steps) in enumerate(blocks):
            lines.append(f'<tb id="{number}" send="{send}" recv="{recv}" chan="{number}">')
            lines += [*steps, "</tb>"]
        lines.append("</gpu>")
    return "\n".join([*lines, "</algo>"])


def ring(world):
    """An all-reduce whose sums are not kept on the way."""

    def steps(rank):
        kinds = ["s", *["rrs"] * (world - 2), "rrcs", *["rcs"] * (world - 2), "r"]
        for number, kind in enumerate(kinds):
            slot = ("i", (rank - number) % world)
            yield step(number, kind, src=slot, dst=slot)

    return xml(
        "allreduce",
        world,
        [[((r + 1) % world, (r - 1) % world, [*steps(r)])] for r in range(world)],
    )


def in_scratch():
    """Two gpus: what comes lies in scratch memory, another thread block adds it."""

    def blocks(rank):
        mine, other = ("i", rank), ("i", 1 - rank)
        return [
            (1 - rank, 1 - rank, [step(0, "s", src=other), step(1, "r", dst=("s", 0))]),
            (-1, -1, [step(0, "re", src=("s", 0), dst=mine, after=(0, 1))]),
            (1 - rank, 1 - rank, [step(0, "s", src=mine, after=(1, 0)), step(1, "r", dst=other)]),
        ]

    return xml("allreduce", 2, [blocks(0), blocks(1)], scratch=1)


def gather(world, pieces=1):
    """Each gpu sends its part to every other one, in as many pieces."""

    def blocks(rank):
        for far in range(1, world):
            to, come = (rank + far) % world, (rank - far) % world
            yield (
                to,
                come,
                [
                    step(0, "s", src=("o", rank * pieces), cnt=pieces),
                    step(1, "r", dst=("o", come * pieces), cnt=pieces),
                ],
            )

    return xml("allgather", world * pieces, [[*blocks(rank)] for rank in range(world)])


def _buffer(index, **where):
    return {"index": index, "size": 1, **where}


def _gpu(rank, blocks, scratch, remote):
    references = {"access_channel_type": "memory", "remote_buffer_ids": [0]}
    channels = {"channel_type": "memory", "channel_ids": [0]}
    return {
        "id": rank, "input_chunks": 2, "output_chunks": 2, "scratch_chunks": scratch,
        "threadblocks": [
            {"id": i, "ops": ops, "channels": [channels], "remote_buffer_refs": [references]}
            for i, ops in enumerate(blocks)
        ],
        "channels": [{"channel_type": "memory", "connected_to": [1 - rank]}],
        "remote_buffers": [{"rank": 1 - rank, "type": remote, "access_channel_types": ["memory"]}],
    }  # fmt: skip


def mscclpp(gpus, protocol="Simple"):
    return json.dumps(
        {
            "name": "mine",
            "collective": "allreduce",
            "protocol": protocol,
            "inplace": True,
            "gpus": gpus,
        },
        indent=1,
    )


def by_reading():
    """Each gpu reads its chunk of the other one, adds it, and writes the sum there."""
    signals = [
        {"name": kind, "channel_ids": [0], "channel_type": "memory"} for kind in ("signal", "wait")
    ]

    def ops(rank):
        here, there = _buffer(rank, type="i"), _buffer(rank, buffer_id=0)
        both = {"src_buff": [here, there], "dst_buff": [here, there], "channel_type": "memory"}
        return [*signals, {"name": "nop"}, {"name": "rres", **both}, {"name": "nop"}, *signals]

    return mscclpp([_gpu(rank, [ops(rank)], 0, "i") for rank in (0, 1)])


def by_packets():
    """Packets in scratch memory, and no signal."""

    def put(kind, sources, targets):
        return {"name": kind, "src_buff": sources, "dst_buff": targets, "channel_type": "memory"}

    def blocks(rank):
        other = 1 - rank
        mine = _buffer(rank, type="i")
        return [
            [
                put("ppkt", [_buffer(other, type="i")], [_buffer(0, buffer_id=0)]),
                put("respkt", [mine, _buffer(0, type="s")], [mine, _buffer(1, buffer_id=0)]),
            ],
            [put("upkt", [_buffer(1, type="s")], [_buffer(other, type="i")])],
        ]

    return mscclpp([_gpu(rank, blocks(rank), 2, "s") for rank in (0, 1)], "LL")


PLANS = {
    "ring.xml": ring(4),
    "in_scratch.xml": in_scratch(),
    "gather.xml": gather(3),
    "by_reading.json": by_reading(),
    "by_packets.json": by_packets(),
}
