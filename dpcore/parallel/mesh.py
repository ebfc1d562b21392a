"""``dp.mesh``: ranks as a grid, with a communicator for each of its axes."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

from dpcore.comm.communicators.checks import check_integer
from dpcore.errors import Unsupported

if TYPE_CHECKING:
    import torch


def mesh(comm: Any, **sizes: int) -> Mesh:
    """Splits ``comm`` into the axes of a grid. Every rank of ``comm`` calls it. The last axis
    varies fastest: with ``data=2, tensor=2``, ranks 0 and 1 share ``mesh.tensor``, and ranks 0 and
    2 ``mesh.data``.

    ``comm``   a communicator, or a ``DeviceMesh`` of torch with names, which also gives the sizes.
    ``sizes``  ranks along each axis, by name. The product is ``comm.world_size``; one of them may
               be -1, which stands for the rest.

    >>> import dpcore as dp
    >>> print(dp.mesh(dp.init(rank=0, world_size=1), data=-1, tensor=1))
    mesh of data=1 x tensor=1, here data 0, tensor 0
    >>> dp.finalize()
    """
    if hasattr(comm, "mesh_dim_names"):
        return _of_torch(comm, sizes)
    if not hasattr(comm, "world_size"):
        raise TypeError(
            f"mesh: expected a communicator or a DeviceMesh of torch, not {comm!r}; pass "
            "comm=dpcore.init()"
        )
    sizes = {name: check_integer(size, f"mesh: {name}") for name, size in sizes.items()}
    sizes = _completed(sizes, comm.world_size)
    axes, stride = {}, comm.world_size
    for name, size in sizes.items():
        stride //= size
        place = comm.rank // stride % size
        axes[name] = comm.split(comm.rank - place * stride, key=place)  # named by its first rank
    return Mesh(comm, sizes, axes)


class Mesh:
    """The result of ``dp.mesh()``: ``mesh.data`` is the communicator of the axis "data"."""

    def __init__(self, comm: Any, sizes: dict[str, int], axes: dict[str, Any]) -> None:
        self.comm = comm
        self.sizes = sizes
        self._axes = axes

    def __getattr__(self, name: str) -> Any:
        axes = self.__dict__.get("_axes", {})
        if name not in axes:
            text = f"this mesh has no axis {name!r}; it has {', '.join(axes)}"
            if axes and hasattr(self.comm, name):
                first = next(iter(axes))
                text += f"; give one of its axes where a communicator is needed: mesh.{first}"
            raise AttributeError(text)
        return axes[name]

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's position on each axis."""
        return {name: axis.rank for name, axis in self._axes.items()}

    def generator(self, seed: int, *differ: str) -> torch.Generator:
        """A generator whose numbers differ along the axes ``differ`` and agree along the others."""
        import torch

        if unknown := [name for name in differ if name not in self.sizes]:
            raise Unsupported(f"generator: {unknown[0]!r} is not an axis of {list(self.sizes)}")
        places = [(name, place) for name, place in self.coordinates.items() if name in differ]
        return torch.Generator().manual_seed(random.Random(f"{seed} {places}").getrandbits(63))

    def to_torch(self, device_type: str = "cpu") -> Any:
        """torch's ``DeviceMesh`` of the same ranks, sizes and names."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        here = self.comm.rank, self.comm.world_size
        if not dist.is_initialized() or here != (dist.get_rank(), dist.get_world_size()):
            raise Unsupported(
                "to_torch: torch.distributed must have the same ranks; call "
                f'init_process_group("dpcore", rank={here[0]}, world_size={here[1]}) first'
            )
        names = tuple(self.sizes)
        return init_device_mesh(device_type, tuple(self.sizes.values()), mesh_dim_names=names)

    def close(self) -> None:
        """Closes the communicators of the axes, but not the one that was split."""
        for axis in self._axes.values():
            axis.close()

    def __repr__(self) -> str:
        sizes = " x ".join(f"{name}={size}" for name, size in self.sizes.items())
        here = ", ".join(f"{name} {place}" for name, place in self.coordinates.items())
        return f"mesh of {sizes}, here {here}"


def _of_torch(device_mesh: Any, sizes: dict[str, int]) -> Mesh:
    """A mesh of the communicators behind torch's groups. It makes no new ones."""
    from dpcore.comm.communicators.torch_group import TorchCommunicator
    from dpcore.comm.launch.torch_backend import communicator_of

    names = device_mesh.mesh_dim_names or ()
    found = dict(zip(names, device_mesh.mesh.shape, strict=False))
    if not found:
        raise Unsupported("mesh: torch's DeviceMesh has no names; make it with mesh_dim_names=")
    if sizes and sizes != found:
        raise Unsupported(f"mesh: {sizes} are not the axes of torch's mesh, {found}")
    groups = {name: device_mesh.get_group(name) for name in names}
    axes = {n: communicator_of(group) or TorchCommunicator(group) for n, group in groups.items()}
    return Mesh(TorchCommunicator(), found, axes)


def _completed(sizes: dict[str, int], world: int) -> dict[str, int]:
    """Checks the sizes, whose product must be the world size, and fills in a -1."""
    if not sizes:
        raise Unsupported("mesh: name the axes and their sizes, such as data=2, tensor=2")
    for name in sizes:
        if name.startswith("_") or name in ("comm", "sizes") or hasattr(Mesh, name):
            raise Unsupported(f"mesh: {name!r} is a reserved name; rename the axis")
    known = math.prod(size for size in sizes.values() if size != -1)
    rest = world // known if known > 0 and world % known == 0 else -1
    full = {name: rest if size == -1 else size for name, size in sizes.items()}
    several = list(sizes.values()).count(-1) > 1
    if several or min(full.values()) < 1 or math.prod(full.values()) != world:
        wanted = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise Unsupported(f"mesh: {wanted} does not give the {world} ranks of the communicator")
    return full
