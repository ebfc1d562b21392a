"""Work, its futures, and what profilers and the flight recorder see of it."""

import torch
import torch.distributed as dist

from tests.ranks import python
from tests.ranks.groups import in_group


def test_futures_hold_the_tensors_and_run_callbacks():
    def body():
        world = dist.get_world_size()
        tensor = torch.ones(10)
        work = dist.all_reduce(tensor, async_op=True)
        future = work.get_future()
        future.wait()
        assert future.value()[0] is not None and torch.equal(future.value()[0], tensor)
        assert work.get_future().value()[0].data_ptr() == tensor.data_ptr()
        assert work.is_completed() and work.is_success()

        def second(first):
            value = first.value()[0] + 1
            return dist.all_reduce(value, async_op=True).get_future().wait()[0]

        # A callback that waits for another operation, which has a callback of its own.
        chained = dist.all_reduce(torch.ones(4), async_op=True).get_future().then(second)
        assert torch.equal(chained.wait(), torch.full((4,), float(world * (world + 1))))

        parts = [torch.empty(2) for _ in range(world)]
        gathered = dist.all_gather(parts, torch.ones(2), async_op=True).get_future().wait()
        assert all(torch.equal(part, torch.ones(2)) for part in gathered)

    in_group(body, 2)


def test_a_work_lets_go_of_tensors_without_its_lock():
    """The callback thread needs Python's lock for that, which the caller holds in get_future()."""

    def body():
        for _ in range(500):
            parts = [torch.empty(2), torch.empty(2)]  # not in a row: copied to when complete
            work = dist.all_gather(parts, torch.ones(2), async_op=True)
            work.get_future().wait()
            work = dist.all_gather(parts, torch.ones(2), async_op=True)
            del parts
            while not work.is_completed():
                pass

    in_group(body, 2)


def test_callbacks_that_wait_for_each_other_do_not_starve():
    def body():
        def nested(depth):
            future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
            if depth == 0:
                return future.wait()[0].item()
            return future.then(lambda done: nested(depth - 1)).wait()

        assert nested(6) == 2.0

    in_group(body, 2)


def test_dropped_work_keeps_its_tensors():
    def body():
        import gc

        for _ in range(50):
            dist.all_reduce(torch.ones(20_000), async_op=True)
        gc.collect()
        last = torch.ones(1)
        dist.all_reduce(last)
        assert last.item() == 2

    in_group(body, 2)


def test_profilers_see_operations_by_name():
    def body():
        with torch.autograd.profiler.profile(record_shapes=True) as profile:
            dist.all_reduce(torch.ones(3))
            dist.broadcast(torch.ones(4), 0, async_op=True).wait()
        return {
            event.name: event.input_shapes
            for event in profile.function_events
            if event.name.startswith("dpcore:")
        }

    wanted = {"dpcore:all_reduce": [[3]], "dpcore:broadcast": [[4]]}
    assert in_group(body, 2) == [wanted] * 2


def test_torchfrtrace_reads_the_flight_record(tmp_path):
    """One rank runs ahead: the analysis says which."""

    def body(folder):
        from dpcore.comm.launch.torch_backend import flight_record, write_flight_record

        tensor = torch.ones(8)
        dist.all_reduce(tensor)
        work = None
        if dist.get_rank() == 0:
            work = dist.all_reduce(torch.ones(5), async_op=True)
        path = write_flight_record(f"{folder}/flight_")
        entries = flight_record()["entries"]
        dist.group.WORLD.monitored_barrier()
        if work is None:
            dist.all_reduce(torch.ones(5))
        else:
            work.wait()
        assert flight_record()["entries"][-1]["state"] == "completed"
        return path, [(entry["profiling_name"], entry["state"]) for entry in entries]

    (_, ahead), (_, behind) = in_group(body, 2, str(tmp_path))
    # The only name that torch 2.11's analysis reads.
    name = "gloo:all_reduce" if torch.__version__ >= (2, 12) else "nccl:all_reduce"
    assert ahead == [(name, "completed"), (name, "scheduled")]
    assert behind == [(name, "completed")]
    analysis = python.run(
        *("-m", "torch.distributed.flight_recorder.fr_trace", tmp_path, "-p", "flight_"),
        capture_output=True,
        text=True,
    )
    text = analysis.stdout + analysis.stderr
    assert analysis.returncode == 0, text
    assert "missing ranks: {1}" in text, text
