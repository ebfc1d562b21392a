"""Messages over the backend "dpcore": send, receive, from any rank, batches, objects."""

import torch
import torch.distributed as dist

from tests.ranks.groups import in_group


def rings_and_batches():
    rank, world = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % world, (rank - 1) % world
    works = []
    received = {}
    for tag, count in ((0, 3), (7, 100_000), (2, 0)):
        works.append(dist.isend(torch.full((count,), float(rank + tag)), after, tag=tag))
        received[tag] = torch.empty(count)
    for tag in reversed(received):
        works.append(dist.irecv(received[tag], before, tag=tag))
    for work in works:
        work.wait()
    for tag, tensor in received.items():
        assert torch.equal(tensor, torch.full_like(tensor, float(before + tag)))
    target = torch.empty(5)
    batch = [
        dist.P2POp(dist.isend, torch.full((5,), float(rank)), after),
        dist.P2POp(dist.irecv, target, before),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert target.tolist() == [float(before)] * 5
    gaps = torch.zeros(4, 2)
    works = [dist.isend(torch.arange(8.0).reshape(4, 2)[:, 1], after)]
    works.append(dist.irecv(gaps[:, 0], before))
    for work in works:
        work.wait()
    assert gaps.tolist() == [[1, 0], [3, 0], [5, 0], [7, 0]]


def from_any_rank():
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank != 0:
        dist.send(torch.full((3,), float(rank)), 0)
        dist.send(torch.full((3,), float(-rank)), 0)
        return
    seen = []
    for _ in range(2 * (world - 1)):
        tensor = torch.empty(3)
        source = dist.recv(tensor)
        seen.append((source, tensor[0].item()))
    for peer in range(1, world):  # each rank's own stay in their order
        assert [value for source, value in seen if source == peer] == [peer, -peer]


def objects():
    rank, world = dist.get_rank(), dist.get_world_size()
    everything = [None] * world
    dist.all_gather_object(everything, {"rank": rank, "text": "x" * 1000 * rank})
    assert [entry["rank"] for entry in everything] == list(range(world))
    gathered = [None] * world if rank == 0 else None
    dist.gather_object(("of", rank), gathered, dst=0)
    assert gathered is None or gathered == [("of", peer) for peer in range(world)]
    shared = [rank, "y" * rank] if rank == 1 else [None, None]
    dist.broadcast_object_list(shared, src=1)
    assert shared == [1, "y"]
    own = [None]
    dist.scatter_object_list(own, [("to", p) for p in range(world)] if rank == 0 else None, src=0)
    assert own == [("to", rank)]
    if rank == 0:
        dist.send_object_list(["hello", 1], dst=1)
    elif rank == 1:
        words = [None, None]
        dist.recv_object_list(words, src=0)
        assert words == ["hello", 1]


def test_messages():
    def body():
        rings_and_batches()
        from_any_rank()
        objects()
        dist.barrier()

    in_group(body, 3)


def test_a_batch_is_one_work():
    """As torch makes it of batch_isend_irecv where it has been built for GPUs."""

    def body():
        rank, world = dist.get_rank(), dist.get_world_size()
        after, before = (rank + 1) % world, (rank - 1) % world
        for use_future in (False, True):
            target, shared = torch.empty(5), torch.full((2,), float(rank))
            with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
                dist.isend(torch.full((5,), float(rank)), after)
                dist.irecv(target, before)
                dist.broadcast(shared, 1)
            (work,) = manager.works
            if use_future:
                futures = work.get_future().wait()
                assert [future.value()[0].numel() for future in futures] == [5, 5, 2]
            work.wait()
            assert work.is_completed() and work.is_success()
            assert target.tolist() == [float(before)] * 5 and shared.tolist() == [1.0, 1.0]
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            pass
        manager.wait()
        dist.barrier()

    in_group(body, 3)
