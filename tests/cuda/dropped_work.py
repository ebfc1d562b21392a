"""Work that nobody waits for, over communicators whose memory torch allocates."""

import torch


def keeps_memory_of_dropped_work(comm):
    """Nobody keeps the work or its tensors while the GPU has not even begun; torch would give their
    memory to the next ones. Out of place, so that NCCL copies in a world of one too."""
    comm.all_gather(torch.zeros(1 << 20, device="cuda"), torch.ones(1 << 20, device="cuda"))
    torch.cuda.synchronize()
    for _ in range(5):
        out, x = torch.zeros(1 << 20, device="cuda"), torch.ones(1 << 20, device="cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.default_stream())
            torch.cuda._sleep(50_000_000)  # some 25 ms
            comm.all_gather(out, x, async_op=True)
        del out, x  # of a stream that does not wait for the operation
        y = torch.full((1 << 20,), 7.0, device="cuda")
        z = torch.full((1 << 20,), 7.0, device="cuda")
        torch.cuda.synchronize()
        assert bool((y == 7).all()) and bool((z == 7).all())
