"""Plans of ours on torch's executor, and plans of torch's read by us, by way of CSV."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime, get_schedule_class

import dpcore as dp
from benchmarks.harness.torch_strategies import (
    Sizes,
    batch_of,
    grid_over,
    loss_of,
    model_of,
    sgd,
    stages_of,
    whole,
)
from dpcore.parallel.pipeline_plans import PipelinePlan
from dpcore.tools.show import figures_of, read_run
from tests.ranks.groups import in_group

SMALL = Sizes(rows=8, microbatches=4, layers=4)
WORLD = 2
# A backward in two parts: the gradient of the input first, since another rank waits for it.
IN_TWO_PARTS = """
0F0,0F1,0I0,0F2,0I1,0W0,0F3,0I2,0W1,0I3,0W2,0W3
1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1F3,1I3,1W2,1W3
""".strip()
OF_TORCH = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")


def plans_of_ours():
    yield dp.pipeline_plan("GPipe", stages=2, microbatches=4)
    yield dp.pipeline_plan("1F1B", stages=2, microbatches=4)
    yield dp.pipeline_plan("Interleaved1F1B", stages=4, microbatches=4, ranks=2)
    yield PipelinePlan.from_csv(IN_TWO_PARTS, "in two parts")


def losses_and_weights(plan, path, mesh):
    """A step of torch's executor, which has nothing but the file."""
    path.write_text(plan.to_csv())
    mine = [stage for stage, rank in plan.rank_of.items() if rank == dist.get_rank()]
    stages = stages_of(SMALL, plan.stages, mine, mesh)
    schedule = _PipelineScheduleRuntime(stages, plan.microbatches, loss_fn=loss_of)
    schedule._load_csv(str(path))
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer, losses = sgd(parameters), []
    inputs, targets = batch_of(SMALL, 0)
    given = [inputs] if any(stage.is_first for stage in stages) else []
    last = any(stage.is_last for stage in stages)
    schedule.step(*given, target=targets if last else None, losses=losses if last else None)
    optimizer.step()
    return losses, {k: v for stage in stages for k, v in whole(stage.submod).items()}


def plan_of_torchs(name, path, mesh):
    """One that torch has computed and written, as we read it."""
    rank, count = mesh.get_local_rank(), 2 * WORLD
    v_shaped = "Interleaved" not in name
    mine = [rank, count - 1 - rank if v_shaped else rank + WORLD]
    stages = stages_of(SMALL, count, mine, mesh)
    torchs = get_schedule_class(name.removeprefix("Schedule"))(stages, 4, loss_fn=loss_of)
    torchs._dump_csv(str(path), format="compute_only")
    plan = dp.pipeline_plan(path)
    assert plan.microbatches == 4 and plan.stages == count
    assert plan.rank_of == torchs.stage_index_to_group_rank
    return plan


@pytest.mark.filterwarnings("ignore")
def test_plans_travel_both_ways(tmp_path):
    def body():
        mesh = grid_over("dpcore", WORLD)(pipeline=-1)
        folder = tmp_path / str(dist.get_rank())
        folder.mkdir()
        plans = list(plans_of_ours())
        plans += [plan_of_torchs(name, folder / f"{name}.csv", mesh) for name in OF_TORCH]
        found = {}
        for plan in plans:
            try:
                found[plan.name] = losses_and_weights(plan, folder / "plan.csv", mesh)
            except Exception as error:
                raise AssertionError(f"{plan.name} on rank {dist.get_rank()}") from error
        return found, {plan.name: {a.kind for row in plan.actions for a in row} for plan in plans}

    of_ranks = in_group(body, WORLD)
    module = model_of(SMALL)
    optimizer = sgd(module.parameters())
    inputs, targets = batch_of(SMALL, 0)
    loss = loss_of(module(inputs), targets)
    loss.backward()
    optimizer.step()
    for name in of_ranks[0][0]:
        losses, weights = [], {}
        for found, _ in of_ranks:
            losses += found[name][0]
            weights |= found[name][1]
        assert len(losses) == SMALL.microbatches
        torch.testing.assert_close(torch.stack(losses).mean(), loss.detach(), rtol=0, atol=1e-12)
        assert weights.keys() == module.state_dict().keys()
        for parameter, value in module.state_dict().items():
            torch.testing.assert_close(weights[parameter], value, rtol=0, atol=1e-12, msg=name)
    kinds = of_ranks[0][1]
    assert kinds["in two parts"] == kinds["ScheduleInterleavedZeroBubble"] | {"I", "W"}
    assert kinds["1F1B"] == {"F", "B"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "DualPipeV"])
def test_passes_are_found_in_files_of_torchs_profiler(name, tmp_path):
    """In the order of the plan, on each rank; of the halves of backwards, too."""

    def body():
        mesh = grid_over("dpcore", WORLD)(pipeline=-1)
        rank, count = mesh.get_local_rank(), 2 * WORLD
        mine = [rank, rank + WORLD if "Interleaved" in name else count - 1 - rank]
        stages = stages_of(SMALL, count, mine, mesh)
        schedule = get_schedule_class(name)(stages, SMALL.microbatches, loss_fn=loss_of)
        inputs, targets = batch_of(SMALL, 0)
        given = [inputs] if any(stage.is_first for stage in stages) else []
        target = targets if any(stage.is_last for stage in stages) else None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for _ in range(2):
                schedule.step(*given, target=target)
        profiler.export_chrome_trace(str(tmp_path / "profiles" / f"rank{rank}.json"))
        schedule._dump_csv(str(tmp_path / f"{rank}.csv"), format="compute_only")
        return dp.pipeline_plan(tmp_path / f"{rank}.csv")

    (tmp_path / "profiles").mkdir()
    plan = in_group(body, WORLD)[0]
    run = read_run(tmp_path / "profiles")
    for rank, row in zip(run.ranks, plan.actions, strict=True):
        assert [event.name for event in rank.compute] == 2 * [str(action) for action in row]
    found = figures_of(run).pipeline
    assert found.steps == 2 and 0 < found.bubble < 1 and found.priced is not None
    assert [line.live for line in found.ranks] == plan.live()
