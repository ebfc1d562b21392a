"""What docs/compile.md says of each way to compile and to train: which gradients leave early, and
that the averages are those of the same model without torch.compile.

All cases run in one world. Layers have no bias, so that Inductor has no kernels to compile.
"""

import copy
import warnings

import torch
import torch._functorch.config
import torch._inductor.config
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

import dpcore
from dpcore.ddp.compiled import torch_private

WIDTH = 8


class Layer(nn.Linear):
    """dynamo skips the frames of torch's own layers."""

    def forward(self, x):
        return super().forward(x)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class WithLoss(Layers):
    def forward(self, x):
        return super().forward(x).square().sum()


class Bent(Layers):
    """Inductor writes into what sin has saved, where nothing needs it any more."""

    def forward(self, x):
        for layer in self.layers:
            x = torch.sin(layer(x))
        return x


class Regional(Layers):
    """dynamo compiles the region once, and the graph calls it three times."""

    def forward(self, x):
        for layer in self.layers:
            x = region(layer, x)
        return x


@torch.compiler.nested_compile_region
def region(layer, x):
    return layer(x)


class Sliced(Layers):
    """As models of Transformers: the slice is a new module, which registers its layers."""

    def forward(self, x):
        return nn.Sequential(*self.layers[:3])(x)


class Broken(Layers):
    def forward(self, x):
        x = self.layers[0](x)
        torch._dynamo.graph_break()
        return self.layers[2](self.layers[1](x))


class Twice(Layers):
    """One block twice in one graph."""

    def forward(self, x):
        return self.layers[2](self.layers[1](self.layers[1](self.layers[0](x))))


class TwiceInTwoGraphs(Layers):
    def forward(self, x):
        x = self.layers[1](self.layers[0](x))
        torch._dynamo.graph_break()
        return self.layers[2](self.layers[1](x))


class Tied(Layers):
    def __init__(self):
        super().__init__()
        self.layers[2].weight = self.layers[0].weight


class Unused(Layers):
    def forward(self, x):
        return self.layers[2](self.layers[0](x))


class Checkpointed(Layers):
    reentrant = False

    def forward(self, x):
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class Run:
    """A wrapped and compiled model beside one that sees the batches of both ranks."""

    def __init__(
        self,
        comm,
        kind=Layers,
        how="around",
        backend="inductor",
        hook=None,
        inductor=None,
        **options,
    ):
        torch._dynamo.reset()
        torch.manual_seed(3)
        self.comm, self.module = comm, kind()
        self.alone = kind()
        self.alone.load_state_dict(self.module.state_dict())
        inner = self.module
        if how == "before":
            inner = torch.compile(self.module, backend=backend)
        elif how == "in place":
            self.module.compile(backend=backend)
        elif how == "layers":
            for layer in self.module.layers:
                layer.compile(backend=backend)
        self.model = dpcore.DataParallel(inner, comm=comm, **options)
        if hook is not None:
            self.model.register_comm_hook(None, hook)
        self.forward = self.model
        if how == "around":
            self.forward = torch.compile(self.model, backend=backend, options=inductor)
        self.number = 0

    def inputs(self, rows=2):
        self.number += 1
        return [
            torch.linspace(-1, 1, rows * WIDTH).view(rows, WIDTH) * (rank + self.number)
            for rank in range(2)
        ]

    def step(self, rows=2):
        self.zero_grad()
        xs = self.inputs(rows)
        self.forward(xs[self.comm.rank]).square().sum().backward()
        self.alone_on(xs)
        self.check()
        return self.early

    def alone_on(self, xs):
        (sum(self.alone(x).square().sum() for x in xs) / 2).backward()

    def zero_grad(self):
        self.model.zero_grad()
        self.alone.zero_grad()

    def check(self, of=2e-6):
        for mine, other in zip(self.module.parameters(), self.alone.parameters(), strict=True):
            if other.grad is None:
                assert mine.grad is None
                continue
            largest = float(other.grad.abs().max())
            torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=of * largest)

    @property
    def early(self):
        return self.model._reducer.early_gradients


def steps(comm, kind=Layers, **options):
    run = Run(comm, kind, **options)
    return [run.step() for _ in range(2)]


# ---- cases: what they return is the number of gradients that left early in each step -----------


def with_configuration(comm, **settings):
    with torch._inductor.config.patch(**settings):
        return steps(comm)


def not_asked(comm):
    with torch._dynamo.config.patch(optimize_ddp=False), warnings.catch_warnings():
        warnings.simplefilter("error")
        run = Run(comm)
        early = [run.step() for _ in range(3)]
        assert "optimize_ddp is False" in repr(run.model.bucket_report())
    return early


def with_another_pass(comm):
    seen = []
    early = steps(comm, inductor={"joint_custom_post_pass": seen.append})
    assert len(seen) == 1
    return early


def across_steps(comm, schedule):
    """From the fifth forward on, each of three layers is a graph of its own."""
    torch._dynamo.utils.counters.clear()
    run = Run(comm, schedule=schedule)
    optimizer = torch.optim.SGD(run.model.parameters(), 0.1)
    optimizer = dpcore.DistributedOptimizer(optimizer, run.model)
    alone = torch.optim.SGD(run.alone.parameters(), 0.1)
    early, graphs = [], []
    for _ in range(7):
        xs = run.inputs()
        loss = run.forward(xs[comm.rank]).square().mean()
        graphs.append(graphs_in(loss))
        loss.backward()
        early.append(run.early)
        optimizer.step()
        optimizer.zero_grad()
        alone.zero_grad()
        (sum(run.alone(x).square().mean() for x in xs) / 2).backward()
        alone.step()
    for mine, other in zip(run.model.parameters(), run.alone.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
    assert run.model._graphs.count == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert graphs == [0] * 4 + [3] * 3
    return early


def graphs_in(loss):
    """How many compiled graphs its backward consists of."""
    found, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            todo += [following for following, _ in node.next_functions]
    return sum(node.name() == "CompiledFunctionBackward" for node in found)


def accumulated(comm):
    run = Run(comm)
    early = []
    for _ in range(2):
        run.zero_grad()
        with run.model.no_sync():
            xs = run.inputs()
            run.forward(xs[comm.rank]).square().sum().backward()
            run.alone_on(xs)
        ys = run.inputs()
        run.forward(ys[comm.rank]).square().sum().backward()
        run.alone_on(ys)
        run.check()
        early.append(run.early)
    return early


def not_zeroed(comm):
    """Averages of the step before stay, and the new ones are added."""
    run = Run(comm)
    for _ in range(2):
        xs = run.inputs()
        run.forward(xs[comm.rank]).square().sum().backward()
        run.alone_on(xs)
        run.check()
    return [run.early]


def registers_modules(comm):
    """A module that has nothing to do with the wrapped one can be one graph, too."""
    run = Run(comm, Sliced)
    early = [run.step(), run.step()]
    assert run.model._graphs.whole == 1
    torch.compile(Sliced(), fullgraph=True)(torch.ones(2, WIDTH))
    return early


def two_forwards(comm):
    run = Run(comm)
    xs, ys = run.inputs(), run.inputs()
    (run.forward(xs[comm.rank]) * run.forward(ys[comm.rank])).sum().backward()
    (sum((run.alone(x) * run.alone(y)).sum() for x, y in zip(xs, ys, strict=True)) / 2).backward()
    run.check()
    return [run.early]


@torch._functorch.config.patch(donated_buffer=False)  # else torch refuses a kept graph
def two_backwards(comm, kind=Layers, **options):
    run = Run(comm, kind, **options)
    xs = run.inputs()
    loss = run.forward(xs[comm.rank]).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    for _ in range(2):
        run.alone_on(xs)
    run.check()
    return [run.step()]


@torch._functorch.config.patch(donated_buffer=False)
def grad_then_backward(comm):
    run = Run(comm)
    xs = run.inputs()
    loss = run.forward(xs[comm.rank]).square().sum()
    (of_loss,) = torch.autograd.grad(loss, [run.module.layers[0].weight], retain_graph=True)
    assert of_loss.abs().sum() > 0
    loss.backward()
    run.alone_on(xs)
    run.check()
    return [run.early]


def kept_after_another(comm, **options):
    """Inductor's cache has code of the same graph that writes into saved tensors."""
    Run(comm, Bent, **options).step()
    return two_backwards(comm, Bent, **options)


def parameter_hook(comm):
    run = Run(comm)
    for module in (run.module, run.alone):
        module.layers[1].weight.register_hook(lambda grad: grad * 3)
    return [run.step()]


def hook_after_accumulation(comm):
    run = Run(comm)
    seen = []
    weight = run.module.layers[1].weight
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    early = [run.step()]
    assert len(seen) == 1
    assert "not those of layers.1.weight: a hook of the pr" in repr(run.model.bucket_report())
    return early


def comm_hook(comm):
    run = Run(comm)
    early = [run.step()]  # in one graph that has been compiled before
    run.model.register_comm_hook(None, default_hooks.allreduce_hook)
    return [*early, run.step()]


def compressed(comm):
    run = Run(comm)
    kind = torch.distributed.BuiltinCommHookType.FP16_COMPRESS
    run.model._register_builtin_comm_hook(kind)
    run.check = lambda: Run.check(run, 2e-3)
    return [run.step()]


def parameter_at_the_root(comm):
    """The node that backward begins with adds to a gradient of the compiled graph, too."""
    run = Run(comm)
    xs = run.inputs()
    (run.forward(xs[comm.rank]) @ run.module.layers[1].weight).backward(torch.ones(2, WIDTH))
    for x in xs:
        (run.alone(x) @ run.alone.layers[1].weight).backward(torch.full((2, WIDTH), 0.5))
    run.check()
    assert "not those of layers.1.weight: more than one part" in repr(run.model.bucket_report())
    return [run.early]


def changing_rows(comm):
    run = Run(comm)
    return [run.step(rows) for rows in (2, 3, 5)]


def loss_in_the_graph(comm):
    """The compiled node begins the backward, so torch does not list it among its nodes."""
    run = Run(comm, how="not")

    @torch.compile
    def loss(x):
        return run.model(x).square().sum()

    xs = run.inputs()
    loss(xs[comm.rank]).backward()
    run.alone_on(xs)
    run.check()
    return [run.early]


def loss_in_forward(comm):
    run = Run(comm, WithLoss)
    early = []
    for _ in range(2):
        run.zero_grad()
        xs = run.inputs()
        run.forward(xs[comm.rank]).backward()
        (sum(run.alone(x) for x in xs) / 2).backward()
        run.check()
        early.append(run.early)
    assert run.model._reducer.compiled_gradients == 3
    return early


def under_autocast(comm):
    run = Run(comm)
    run.check = lambda: Run.check(run, 2e-2)
    with torch.autocast("cpu", torch.bfloat16):
        return [run.step()]


def uneven(comm):
    run = Run(comm)
    early = []
    with run.model.join():
        for _ in range(1 + comm.rank):
            run.zero_grad()
            run.forward(run.inputs()[comm.rank]).sum().backward()
            early.append(run.early)
    return early[:1]


def compiled_and_run_before(comm):
    """Its graph exists, without operations: that is said once."""
    run = Run(comm, how="not")
    torch.compile(run.module, dynamic=False)(torch.ones(2, WIDTH)).sum().backward()
    run.module.zero_grad()
    run.forward = torch.compile(run.model, dynamic=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        early = [run.step() for _ in range(4)]
    assert [str(one.message) for one in said if "come at its end" in str(one.message)] != []
    assert "come at its end" in repr(run.model.bucket_report())
    return early


def seen_in_the_report(comm):
    run = Run(comm)
    early = [run.step()]
    assert "torch.compile: 3 of 3 gradients left while" in repr(run.model.bucket_report())
    assert not run.model._reducer.has_rebuilt
    early += [run.step(), run.step()]  # the first step compiled, so the second one is measured
    assert run.model._reducer.has_rebuilt
    order = [n for bucket in run.model._reducer.report() for n in bucket["parameters"]]
    assert order == [f"layers.{number}.weight" for number in (2, 1, 0)]
    return early


def compiled_later(comm):
    """After steps that were not compiled, and in which its buckets were chosen."""
    run = Run(comm, how="not")
    early = [run.step() for _ in range(3)]
    run.forward = torch.compile(run.model)
    early.append(run.step())
    assert "torch.compile: 3 of 3 gradients left while" in repr(run.model.bucket_report())
    return early


def of_torchs_own_class(comm):
    """dynamo skips the frames of nn.Sequential, so that nothing would be compiled."""
    torch._dynamo.reset()
    module = nn.Sequential(Layer(WIDTH, 4, bias=False), Layer(4, 4, bias=False))
    model = dpcore.DataParallel(module, comm=comm)
    run = torch.compile(model)
    run(torch.ones(2, WIDTH)).sum().backward()
    assert model._graphs.whole == 1
    return [model._reducer.early_gradients]


def in_vain(comm):
    """Up to torch 2.13, compile() of torch's own classes compiles nothing."""
    module = nn.Sequential(Layer(WIDTH, 4), nn.Linear(4, 4))
    module[1].compile()
    model = dpcore.DataParallel(module, comm=comm)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.ones(2, WIDTH)).sum().backward()
            model.zero_grad()
    told = "compile() of 1 has compiled nothing"
    is_vain = model._graphs.count == 0
    assert sum(told in str(one.message) for one in said) == is_vain
    assert (told in repr(model.bucket_report())) == is_vain
    return [model._reducer.early_gradients == (0 if is_vain else 2)]


CASES = {
    "torch.compile(wrapped)": (steps, {}, [3, 3]),
    "wrapped(torch.compile(module))": (steps, {"how": "before"}, [3, 3]),
    "module.compile()": (steps, {"how": "in place"}, [3, 3]),
    "each layer compiled": (steps, {"how": "layers"}, [3, 3]),
    "graph breaks": (steps, {"kind": Broken}, [3, 3]),
    "a slice of layers": (registers_modules, {}, [3, 3]),
    "a block twice in a graph": (steps, {"kind": Twice}, [3, 3]),
    "a block in two graphs": (steps, {"kind": TwiceInTwoGraphs}, [2, 2]),
    "tied": (steps, {"kind": Tied}, [2, 2]),
    "unused": (steps, {"kind": Unused, "find_unused_parameters": True}, [2, 2]),
    "checkpoint": (steps, {"kind": Checkpointed}, [3, 3]),
    "reentrant checkpoint": (steps, {"kind": CheckpointedReentrant}, [3, 3]),
    "gradient_as_bucket_view=False": (steps, {"gradient_as_bucket_view": False}, [3, 3]),
    "a bucket each": (steps, {"schedule": "per_parameter"}, [3, 3]),
    "deterministic": (with_configuration, {"deterministic": True}, [3, 3]),
    "optimize_ddp=False": (not_asked, {}, [0] * 3),
    "max-autotune": (steps, {"inductor": {"max_autotune": True}}, [3, 3]),
    "another pass over joint graphs": (with_another_pass, {}, [0, 0]),
    "a region that is compiled once": (steps, {"kind": Regional}, [0, 0]),
    "priority": (across_steps, {"schedule": "priority"}, [0] * 7),
    "zero2": (across_steps, {"schedule": "zero2"}, [0] * 7),
    "static_graph": (steps, {"static_graph": True}, [0, 0]),
    "aot_eager": (steps, {"backend": "aot_eager"}, [0, 0]),
    "no_sync": (accumulated, {}, [3, 3]),
    "gradients that are not zeroed": (not_zeroed, {}, [3]),
    "two forwards before a backward": (two_forwards, {}, [0]),
    "two backwards": (two_backwards, {}, [3]),
    "two backwards, and one in the cache": (kept_after_another, {}, [3]),
    "the same, cut": (kept_after_another, {"hook": default_hooks.allreduce_hook}, [0]),
    "autograd.grad, then backward": (grad_then_backward, {}, [3]),
    "a hook on a parameter": (parameter_hook, {}, [2]),
    "a hook after accumulation": (hook_after_accumulation, {}, [2]),
    "a communication hook": (comm_hook, {}, [3, 0]),
    "FP16_COMPRESS": (compressed, {}, [3]),
    "a parameter of the node that begins": (parameter_at_the_root, {}, [2]),
    "rows that change": (changing_rows, {}, [3, 3, 3]),
    "the loss in the graph": (loss_in_the_graph, {}, [3]),
    "a module that returns its loss": (loss_in_forward, {}, [3, 3]),
    "autocast": (under_autocast, {}, [3]),
    "compiled before it was wrapped": (compiled_and_run_before, {}, [0] * 4),
    "a bucket cap below 1 MiB": (steps, {"bucket_cap_mb": 0.0001}, [3, 3]),
    "the report": (seen_in_the_report, {}, [3] * 3),
    "compiled after some steps": (compiled_later, {}, [0, 0, 0, 3]),
    "nn.Sequential": (of_torchs_own_class, {}, [2]),
    "compile() of torch's own classes": (in_vain, {}, [True]),
    "join": (uneven, {}, [3]),
}


def all_cases(comm):
    assert torch_private.missing() == ""
    found = {}
    for name, (case, options, _) in CASES.items():
        try:
            found[name] = case(comm, **options)
        except Exception as problem:
            raise AssertionError(f"case {name!r}") from problem
    return found


def test_gradients_leave_early_or_as_autograd_delivers_them():
    wanted = {name: early for name, (_, _, early) in CASES.items()}
    for of_rank in dpcore.spawn(all_cases, 2, timeout=400):
        assert of_rank == wanted


def in_threads(comm):
    """Dynamo compiles for one thread after the other: see docs/compile.md."""
    model = dpcore.DataParallel(Layers(), comm=comm)
    alone = copy.deepcopy(model.module)
    run = torch.compile(model)
    xs = [torch.full((2, WIDTH), 0.1 + rank) for rank in range(2)]
    for rank in range(2):
        if rank == comm.rank:
            with model.no_sync():
                run(xs[rank]).sum().backward()
        comm.barrier()
    model.zero_grad()
    run(xs[comm.rank]).sum().backward()
    (sum(alone(x).sum() for x in xs) / 2).backward()
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    assert "ranks are threads" in repr(model.bucket_report())
    return model._reducer.early_gradients


def test_ranks_that_are_threads():
    torch._dynamo.reset()
    torch.compile(Layers())(torch.ones(2, WIDTH)).sum().backward()  # imports what that needs
    assert dpcore.spawn(in_threads, 2, mode="threads", timeout=120) == [0, 0]


def test_wrappers_that_are_not_in_python_are_not_taken():
    inductor = vars(torch)["_TorchCompileInductorWrapper"]
    assert torch_private.takes_operations(inductor(None, None, None))
    assert not torch_private.takes_operations(inductor(None, {"cpp_wrapper": True}, None))


def test_torch_divides_cuda_graphs_at_the_operation():
    assert torch.Tag.cudagraph_unsafe in torch.ops.dpcore.gradient_computed.default.tags
