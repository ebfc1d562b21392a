"""The axes of a grid, to and from torch's, and what is refused."""

import pytest
import torch

import dpcore as dp
from dpcore.parallel import functional
from tests.ranks.groups import in_group


def test_axes_are_groups_of_the_right_ranks():
    def body(comm):
        mesh = dp.mesh(comm, data=2, pipeline=3, tensor=-1)
        assert mesh.sizes == {"data": 2, "pipeline": 3, "tensor": 2}
        assert list(mesh.coordinates.values()) == list(
            torch.unravel_index(torch.tensor(comm.rank), (2, 3, 2))
        )
        for name, size in mesh.sizes.items():
            axis = getattr(mesh, name)
            met = torch.empty(axis.world_size, dtype=torch.int64)
            axis.all_gather(met, torch.tensor([comm.rank]))
            grid = torch.arange(12).reshape(2, 3, 2).movedim(list(mesh.sizes).index(name), -1)
            assert met.tolist() in grid.reshape(-1, size).tolist()
            assert met[axis.rank] == comm.rank
        with pytest.raises(AttributeError, match="no axis 'expert'; it has data, pipeline"):
            _ = mesh.expert
        with pytest.raises(AttributeError, match=r"where a communicator is needed: mesh\.data"):
            functional.reduce_from(torch.ones(2), mesh)
        with pytest.raises(dp.Unsupported, match="'expert' is not an axis"):
            mesh.generator(1, "expert")
        with pytest.raises(dp.Unsupported, match="init_process_group"):
            mesh.to_torch()
        mesh.close()
        assert mesh.data.closed and not comm.closed

    dp.spawn(body, 12, mode="threads")


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({}, "name the axes"),
        ({"data": 3}, "data=3 does not give the 1 ranks"),
        ({"data": -1, "tensor": -1}, "data=-1 x tensor=-1"),
        ({"data": 0, "tensor": -1}, "data=0"),
        ({"close": 1}, "'close' is a reserved name"),
        ({"comm": 1}, "multiple values|reserved name"),
    ],
)
def test_what_is_no_grid_is_refused(sizes, said):
    def body(comm):
        with pytest.raises((dp.Unsupported, TypeError), match=said):
            dp.mesh(comm, **sizes)

    dp.spawn(body, 1, mode="threads")


def test_data_parallel_over_an_axis_composes():
    """Ranks of ``tensor`` have weights of their own, and those of ``data`` the mean gradient."""

    def body(comm):
        mesh = dp.mesh(comm, data=2, tensor=2)
        module = torch.nn.utils.skip_init(torch.nn.Linear, 3, 1, bias=False)
        torch.nn.init.constant_(module.weight, mesh.tensor.rank + 1)
        model = dp.DataParallel(module, comm=mesh.data)
        (model(torch.ones(1, 3)) * (comm.rank + 1)).sum().backward()
        wanted = [2.0, 3.0][mesh.tensor.rank]  # ranks 0 and 2, ranks 1 and 3
        assert module.weight.grad.tolist() == [[wanted] * 3]
        assert module.weight[0, 0] == mesh.tensor.rank + 1

    dp.spawn(body, 4, mode="threads")


def test_to_torch_and_from_torch():
    def body():
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        from dpcore.comm.launch.torch_backend import communicator_of

        theirs = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
        mesh = dp.mesh(theirs)
        assert mesh.sizes == {"data": 2, "tensor": 1}
        assert mesh.data is communicator_of(theirs.get_group("data"))
        x = torch.ones(2)
        mesh.data.all_reduce(x)
        assert x.tolist() == [2.0, 2.0]
        back = mesh.to_torch()
        assert back.mesh_dim_names == ("data", "tensor") and back.shape == (2, 1)
        with pytest.raises(dp.Unsupported, match="not the axes"):
            dp.mesh(theirs, data=1)
        with pytest.raises(dp.Unsupported, match="no names"):
            dp.mesh(init_device_mesh("cpu", (2,)))
        dist.barrier()

    in_group(body, 2)
