"""``measure_overlap(block, step)``: whole intervals, and everything is put back."""

import pytest
import torch

import dpcore as dp
from tests.local_updates.test_local_checkpoints import OPTIONS, made, run, stored
from tests.local_updates.twin import loss_of


def one_step(model, optimizer, comm):
    return lambda: run(model, optimizer, comm, (0,))


def state_of(model, optimizer, block):
    return stored([model.state_dict(), optimizer.state_dict(), block.state_dict()])


@pytest.mark.parametrize("options", [None, *OPTIONS[2:]], ids=str)
def test_what_is_trained_after_it_is_what_it_would_have_been(options):
    def body(comm):
        ended = []
        for measures in (False, True):
            model, optimizer, block = made(comm, options)
            for part in (range(6), range(6, 12)):  # fresh, then in the middle of an interval
                if measures:
                    before = state_of(model, optimizer, block)
                    overlap = dp.measure_overlap(block, one_step(model, optimizer, comm), steps=7)
                    torch.testing.assert_close(
                        state_of(model, optimizer, block), before, rtol=0, atol=0
                    )
                    assert overlap.communication_ms > 0 and overlap.exposed_ms >= 0
                    assert overlap.step_ms > overlap.exposed_ms
                with block:
                    run(model, optimizer, comm, part)
                    saved = block.state_dict()
                block.load_state_dict(saved)
            ended.append(state_of(model, optimizer, block))
        torch.testing.assert_close(*ended, rtol=0, atol=0)

    dp.spawn(body, 2, mode="threads")


def test_an_interval_has_each_fragment_once_and_lands_them_all():
    def body(comm):
        options = {"fragments": 2, "fragment_sync_delay": 1}
        model, optimizer, block = made(comm, options)
        flying, counts = [], []
        inner = block._uncounted

        def uncounted():
            flying.append(block._flight)
            counts.append((block._syncs, block._steps))
            return inner()

        block._uncounted = uncounted
        dp.measure_overlap(block, one_step(model, optimizer, comm), steps=7)
        assert flying == [None] * 8
        assert counts[0] == (2 * 2, 1 + 2 * 4) and counts[-1] == (2 * 9, 1 + 4 * 9)

    dp.spawn(body, 2, mode="threads")


def test_what_cannot_be_measured_is_said():
    def body(comm):
        model, optimizer, block = made(comm, None)
        with pytest.raises(dp.Error, match=r"has called optimizer.step\(\) 0 times in 4 calls"):
            dp.measure_overlap(block, lambda: loss_of(model, 0, 2, 0).backward(), steps=7)
        with block, pytest.raises(dp.Unsupported, match="has been entered"):
            dp.measure_overlap(block, one_step(model, optimizer, comm), steps=7)

    dp.spawn(body, 2, mode="threads")
