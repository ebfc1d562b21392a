"""What the flight recorder writes, read by torch's own analysis."""

import json

import pytest
import torch
import torch.distributed as dist

import dpcore
from tests.ranks import python
from tests.ranks.groups import in_group


def analysis_of(folder):
    """What torchfrtrace says of the records in a folder."""
    module = "torch.distributed.flight_recorder.fr_trace"
    done = python.run("-m", module, folder, "-p", "flight_", capture_output=True, text=True)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    return text


def as_gloo_has_them():
    """Collectives that Gloo records as what they are, and in the same shapes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ones = torch.ones
    every = [ones(2, 3) for _ in range(world)]
    dist.all_reduce(ones(2, 3))
    dist.broadcast(ones(2, 3, dtype=torch.int32), 1)
    dist.reduce(ones(()), 1)
    dist.all_gather([ones(1) for _ in range(world)], ones(1))
    dist.all_gather(every, ones(2, 3))
    dist.gather(ones(2, 3), every if rank == 0 else None, 0)
    dist.scatter(ones(2, 3), every if rank == 0 else None, 0)
    dist.all_to_all_single(ones(2 * world, 3), ones(2 * world, 3))
    dist.barrier()


def others():
    rank, world = dist.get_rank(), dist.get_world_size()
    ones, ranks = torch.ones, range(world)
    every = [ones(2, 3) for _ in ranks]
    dist.reduce_scatter(ones(2, 3), every)
    dist.all_to_all(every, [ones(2, 3) for _ in ranks])
    dist.all_gather_into_tensor(ones(2 * world, 3), ones(2, 3))
    dist.reduce_scatter_tensor(ones(2), ones(2 * world))
    dist.all_gather_coalesced([[ones(2), ones(3)] for _ in ranks], [ones(2), ones(3)])
    dist.all_reduce_coalesced([ones(2), ones(3, 2)])
    dist.all_gather_object([None] * world, "x" * rank)
    dist.all_reduce(torch.eye(3).to_sparse())
    # Parts that every rank knows, but has another one of; then parts that no other rank knows.
    uneven = [ones(r + 1) for r in ranks]
    dist.all_gather(uneven, ones(rank + 1))
    dist.reduce_scatter(ones(rank + 1), uneven)
    dist.all_to_all([ones(r + 1) for r in ranks], [ones(rank + 1) for _ in ranks])
    # Messages: a rank has no part in them, and the number of its collectives stays.
    if rank == 0:
        dist.send(ones(4), 1)
    elif rank == 1:
        dist.recv(ones(4))
    late = dist.new_group([1, world - 1])
    if rank in (1, world - 1):
        dist.all_reduce(ones(5), group=late)
    dist.barrier()


def entries_of(record):
    parts = ("profiling_name", "input_sizes", "output_sizes", "input_dtypes", "output_dtypes")
    return [tuple(map(str, (entry[part] for part in parts))) for entry in record["entries"]]


@pytest.mark.filterwarnings("ignore")
def test_a_healthy_run_of_every_collective_has_no_errors(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000")  # Gloo's recorder is off without it

    def body(folder):
        from dpcore.comm.launch.torch_backend import flight_record, write_flight_record

        as_gloo_has_them()
        alike = entries_of(flight_record())
        others()
        write_flight_record(f"{folder}/flight_")
        return alike, flight_record()["pg_config"]

    results = in_group(body, 3, str(tmp_path))
    text = analysis_of(tmp_path)
    for bad in ("error", "mismatch", "Not all ranks", "culprit"):
        assert bad.lower() not in text.lower(), text
    late = [
        config["ranks"] for _, groups in results for name, config in groups.items() if name != "0"
    ]
    assert late == ["[1, 2]"] * 2

    if torch.__version__ >= (2, 13):  # before, Gloo writes no record, or one without sizes

        def over_gloo():
            as_gloo_has_them()
            record = torch._C._distributed_c10d._dump_fr_trace_json(True, False)
            return entries_of(json.loads(record))

        for (ours, _), gloo in zip(results, in_group(over_gloo, 3, backend="gloo"), strict=True):
            assert ours == gloo


def test_a_real_mismatch_is_found(tmp_path):
    def body(folder):
        from dpcore.comm.launch.torch_backend import write_flight_record

        dist.all_gather([torch.ones(1), torch.ones(1)], torch.ones(1))
        with pytest.raises(dpcore.Mismatch):
            dist.all_reduce(torch.ones(8 + dist.get_rank()))
        write_flight_record(f"{folder}/flight_")

    in_group(body, 2, str(tmp_path))
    text = analysis_of(tmp_path)
    assert "Collective sequence number: 2 has errors" in text, text
    assert "SIZE_OR_SYNTAX_MISMATCH" in text and "'[[8]]'" in text and "'[[9]]'" in text, text
