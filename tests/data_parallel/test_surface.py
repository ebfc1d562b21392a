"""DataParallel passes for torch's DistributedDataParallel, and is none of it inside."""

import copy
import inspect
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dpcore
from dpcore.ddp.torch_face.torch_surface import INHERITED
from tests.data_parallel.models import Small, assert_same_values, batch, part
from tests.data_parallel.test_groups import over_gloo


def alone(body):
    return dpcore.spawn(body, 1, mode="threads")[0]


# ---- the class -------------------------------------------------------------------------------


def test_it_is_one_for_isinstance_and_its_constructor_never_ran(monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("torch's constructor ran")

    monkeypatch.setattr(DistributedDataParallel, "__init__", never)

    def body(comm):
        model = dpcore.DataParallel(Small(), comm=comm)
        assert isinstance(model, DistributedDataParallel)
        model(batch(0)[0]).sum().backward()

    alone(body)


def test_what_is_inherited():
    """Everything else that torch's class has is overridden, or closed."""
    torchs = {n: v for n, v in vars(DistributedDataParallel).items() if inspect.isfunction(v)}
    same = {name for name in torchs if getattr(dpcore.DataParallel, name) is torchs[name]}
    # A class method is not a function: dynamo asks it for the model whose forward runs.
    assert same | {"_get_active_ddp_module"} == set(INHERITED)

    def body(comm):
        model = dpcore.DataParallel(Small(), comm=comm)
        with pytest.raises(dpcore.Unsupported, match="_ddp_init_helper is an internal method"):
            model._ddp_init_helper()
        if hasattr(DistributedDataParallel, "finalize_backward"):  # from torch 2.15 on
            assert not model.require_manual_backward_finalization
            assert not model.should_finalize_after_backward
            with pytest.raises(dpcore.Unsupported):
                model.require_manual_backward_finalization = True
            with pytest.raises(dpcore.Unsupported, match="finalize_backward is an internal method"):
                model.finalize_backward()
        assert model.train(False) is model
        assert not model.module.training
        assert model.to_kwargs((torch.ones(1),), {}, 0) is not None

    alone(body)


def test_the_constructors_arguments_are_torchs():
    """Names, order and defaults; one default differs, and what follows is by name only."""
    ours = inspect.signature(dpcore.DataParallel.__init__).parameters
    torchs = inspect.signature(DistributedDataParallel.__init__).parameters
    own = [name for name, p in ours.items() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert own == ["comm", "schedule", "deterministic", "mistakes", "gradients", "virtual_ranks"]
    # forward_sync_buffers since 2.13, lazy_bucket_allocation since 2.15: each was the last.
    assert [n for n in ours if n not in own][: len(torchs)] == list(torchs)
    known = set(torchs) & set(ours) - {"self"}
    different = {name for name in known if ours[name].default != torchs[name].default}
    assert different <= {"gradient_as_bucket_view", "broadcast_buffers"}


def test_attributes_that_programs_read():
    def body(comm):
        module = Small()
        model = dpcore.DataParallel(module, comm=comm, bucket_cap_mb=3)
        assert model.module is module
        assert model.device == torch.device("cpu")
        assert model.device_ids is None
        assert model.output_device is None
        assert model.bucket_bytes_cap == 3 * 2**20
        assert model.bucket_bytes_cap_list == []
        assert model.broadcast_buffers
        assert model.forward_sync_buffers
        assert model.require_backward_grad_sync
        assert not model._has_rebuilt_buckets
        assert model.process_group.size() == 1
        assert model.join_process_group is model.process_group
        assert model.parameters_to_ignore == set()
        listed = dpcore.DataParallel(module, comm=comm, bucket_cap_mb_list=[0.5, 2])
        assert listed.bucket_bytes_cap_list == [2**19, 2**21]
        assert listed.bucket_bytes_cap == 2**21

    alone(body)


REFUSED = (
    ({"device_ids": [0, 1]}, ValueError, "a rank has one device"),
    ({"device_ids": [0]}, ValueError, "modules on one accelerator"),
    ({"output_device": 1}, ValueError, "modules on one accelerator"),
    ({"delay_all_reduce_named_params": []}, ValueError, "give both or neither"),
    ({"process_group": object(), "device_mesh": object()}, RuntimeError, "Cannot specify both"),
    ({"bucket_cap_mb": -1}, dpcore.Error, r"at least 0 and below \d+; .+ says \[-1\]"),
    ({"bucket_cap_mb": float("nan")}, dpcore.Error, "a number of MiB, at least 0"),
    ({"bucket_cap_mb_list": [1, -2]}, dpcore.Error, "a number of MiB, at least 0"),
)


def test_a_communicator_in_the_place_of_device_ids():
    def body(comm):
        with pytest.raises(TypeError, match=r"device_ids come second.* write comm=comm"):
            dpcore.DataParallel(Small(), comm)
        with pytest.raises(TypeError, match="write comm= for this one"):
            dpcore.DataParallel(Small(), process_group=comm)

    alone(body)


@pytest.mark.parametrize("given", [Small, torch.relu, None])
def test_what_is_no_module(given):
    def body(comm):
        with pytest.raises(TypeError, match=r"an instance of torch\.nn\.Module, and this is"):
            dpcore.DataParallel(given, comm=comm)

    alone(body)


@pytest.mark.parametrize(("options", "kind", "text"), REFUSED, ids=lambda value: str(value)[:24])
def test_arguments_that_do_not_go_together(options, kind, text):
    """The classes of torch's errors."""

    def body(comm):
        with pytest.raises(kind, match=text):
            dpcore.DataParallel(Small(), comm=comm, **options)

    alone(body)


def test_arguments_that_torch_warns_of():
    def body(comm):
        for options, text in (
            ({"broadcast_buffers": True}, "say forward_sync_buffers"),
            ({"broadcast_buffers": True, "forward_sync_buffers": False}, "overrides it"),
            ({"check_reduction": True}, "no effect"),
        ):
            with pytest.warns(FutureWarning, match=text):
                model = dpcore.DataParallel(Small(), comm=comm, **options)
        assert model.forward_sync_buffers
        with pytest.warns(UserWarning, match="lazy_bucket_allocation has no effect"):
            assert dpcore.DataParallel(Small(), comm=comm, lazy_bucket_allocation=True)

    alone(body)


def test_batched_grad_copy_changes_no_bit():
    """There is one copy per gradient in any case, made when the gradient is there."""

    def body(comm):
        found = []
        for batched in (False, True):
            model = dpcore.DataParallel(Small(), comm=comm, batched_grad_copy=batched)
            model(part(batch(0)[0], comm)).square().sum().backward()
            found.append([p.grad for p in model.parameters() if p.requires_grad])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    dpcore.spawn(body, 2, mode="threads")


# ---- parameters that are left out ------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.last = nn.Linear(2, 1, bias=False)
        for parameter in self.parameters():
            nn.init.constant_(parameter, value)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.last(self.second(self.first(x)))


@pytest.mark.parametrize("as_delayed", (False, True))
@pytest.mark.parametrize("names", (("first", "second"), ("first",), ("second",)))
def test_a_tied_parameter_is_left_out_under_all_its_names(names, as_delayed):
    """Those that are delayed are in no bucket under any of them."""

    def body(comm):
        module = Tied(1.0 + comm.rank)
        named = [(f"{name}.weight", module.first.weight) for name in names]
        delayed = {}
        if as_delayed:
            delayed["delay_all_reduce_named_params"] = named
            delayed["param_to_hook_all_reduce"] = module.first.weight
        else:
            ignored = [name for name, _ in named]
            dpcore.DataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
        model = dpcore.DataParallel(module, comm=comm, **delayed)
        model(torch.full((1, 2), 1.0 + comm.rank)).sum().backward()
        in_buckets = [name for line in model.bucket_report() for name in line.parameters]
        return len(in_buckets), module.first.weight.grad.sum().item()

    first, second = dpcore.spawn(body, 2, mode="threads")
    assert first[0] == second[0] == (2 if len(names) == 1 and not as_delayed else 1)
    is_averaged = as_delayed or len(names) == 1
    assert (first[1] == second[1]) == is_averaged


# ---- saving ----------------------------------------------------------------------------------


def test_state_dicts_with_and_without_the_prefix():
    def body(comm):
        model = dpcore.DataParallel(Small(), comm=comm)
        with_prefix, without = model.state_dict(), model.module.state_dict()
        assert [f"module.{name}" for name in without] == list(with_prefix)
        other = dpcore.DataParallel(Small(seed=1), comm=comm)
        other.load_state_dict(with_prefix)
        assert_same_values(other.module, model.module)
        torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(with_prefix, "module.")
        fresh = Small(seed=2)
        fresh.load_state_dict(with_prefix)
        assert_same_values(fresh, model.module)

    alone(body)


def saved_by_pickle(model):
    return pickle.loads(pickle.dumps(model))


def saved_by_torch(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_copies_average_too():
    def body(comm):
        model = dpcore.DataParallel(Small(seed=7 + comm.rank), bucket_cap_mb=0.01)
        x, _ = batch(0)
        model(part(x, comm)).square().sum().backward()
        for save in (saved_by_pickle, saved_by_torch, copy.deepcopy):
            again = save(model)
            assert_same_values(again.module, model.module)
            for wrapped in (again, model):
                wrapped.zero_grad()
                wrapped(part(x, comm)).square().sum().backward()
            for mine, other in zip(again.parameters(), model.parameters(), strict=True):
                assert mine is not other
                if mine.requires_grad:
                    assert torch.equal(mine.grad, other.grad)

    dpcore.spawn(body, 2)


def test_the_default_group_may_be_named():
    def body():
        module = nn.Linear(2, 1)
        again = saved_by_pickle(dpcore.DataParallel(module, process_group=dist.group.WORLD))
        again(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
        other = dpcore.DataParallel(module, process_group=dist.new_group([0, 1]))
        with pytest.raises(RuntimeError, match="uses the default group"):
            pickle.dumps(other)
        return again.module.weight.grad.tolist()

    assert over_gloo(body, 2) == [[[0.5, 0.5]]] * 2


def test_a_model_over_a_group_of_its_own_is_not_saved():
    def body(comm):
        model = dpcore.DataParallel(Small(), comm=comm)
        with pytest.raises(RuntimeError, match="uses the default group"):
            pickle.dumps(model)

    alone(body)


# ---- beside torch's --------------------------------------------------------------------------


def trained(wrap, steps):
    model = wrap(Small(seed=7 + dist.get_rank()))
    for step in range(steps):
        model.zero_grad()
        x, _ = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in batch(step))
        model(x).square().sum().backward()
    return model


def test_beside_torchs_over_gloo():
    """Logging data, hooks with torch's own group, a mesh: one pair of processes for all."""

    def body():
        ours, torchs = (trained(w, 3) for w in (dpcore.DataParallel, DistributedDataParallel))
        for mine, other in zip(ours.parameters(), torchs.parameters(), strict=True):
            if mine.requires_grad:
                torch.testing.assert_close(mine.grad, other.grad)
        mine, other = ours._get_ddp_logging_data(), torchs._get_ddp_logging_data()
        missing = set(other) - set(mine)
        assert not missing
        for field in ("world_size", "rank", "module_name", "backend_name", "dtypes", "iteration"):
            assert mine[field] == other[field], field
        assert mine["total_parameter_size_bytes"] == other["total_parameter_size_bytes"]
        assert ours.process_group is torchs.process_group

        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook

        state = post_localSGD_hook.PostLocalSGDState(
            process_group=None, subgroup=dist.new_group([0, 1]), start_localSGD_iter=2
        )
        hooked = dpcore.DataParallel(Small())
        hooked.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        plain = dpcore.DataParallel(Small())
        wide = dpcore.DataParallel(Small(), comm=dist.group.WORLD)
        wide.register_comm_hook(None, default_hooks.allreduce_hook)
        for step in range(4):
            for model in (hooked, plain, wide):
                model.zero_grad()
                model(batch(step)[0] * (dist.get_rank() + 1)).square().sum().backward()
            for mine, other, third in zip(
                hooked.parameters(), plain.parameters(), wide.parameters(), strict=True
            ):
                if mine.requires_grad:
                    torch.testing.assert_close(mine.grad, other.grad)
                    torch.testing.assert_close(third.grad, other.grad)

        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        meshed = dpcore.DataParallel(nn.Linear(2, 1), device_mesh=mesh)
        assert meshed.device_mesh is mesh
        meshed(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
        assert meshed.module.weight.grad.tolist() == [[0.5, 0.5]]
        flat = init_device_mesh("cpu", (1, dist.get_world_size()))
        with pytest.raises(RuntimeError, match="Only 1D device mesh"):
            dpcore.DataParallel(nn.Linear(2, 1), device_mesh=flat)

        with meshed.join():  # torch's context over torch's group
            for _ in range(1 + dist.get_rank()):
                meshed(torch.ones(1, 2)).sum().backward()
        pair = dist.new_group([0, 1])
        meshed._update_process_group(pair)
        meshed.zero_grad()
        meshed(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
        assert meshed.module.weight.grad.tolist() == [[0.5, 0.5]]

    over_gloo(body, 2)
