"""Models whose parameters or buffers are unusual."""

import warnings

import torch
from torch import nn

from tests.mistakes.here import Net, loss_of, update
from tests.mistakes.right.known import right


def train(here, module, kind=torch.optim.SGD, **options):
    model = here.wrap(module, **options)
    optimizer = here.optimizer(model, kind)
    for step in here.steps:
        update(model, optimizer, here.batch(step))
        yield


@right()
def spectral_norm(here):
    """A buffer of power iterations changes in each forward."""
    module = Net()
    module.head = nn.utils.parametrizations.spectral_norm(module.head)
    yield from train(here, module)


@right()
def weight_norm(here):
    """The weight is made of two parameters in each forward; the older form is a plain attribute."""
    module = Net()
    module.features = nn.utils.parametrizations.weight_norm(module.features)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.head = nn.utils.weight_norm(module.head)
    yield from train(here, module)


@right("tcp")
def batch_norm_over_all_ranks(here):
    """``SyncBatchNorm``."""
    yield from train(here, nn.SyncBatchNorm.convert_sync_batchnorm(Net(buffers=True)))


@right("tcp")
def running_means_of_each_rank(here):
    """``broadcast_buffers=False``: running means differ for ever, which only evaluation sees."""
    yield from train(here, Net(buffers=True), broadcast_buffers=False)


@right()
def batch_norm_frozen_on_all_ranks(here):
    """Fine-tuning keeps batch normalisation in eval mode."""
    model = here.wrap(Net(buffers=True))
    optimizer = here.optimizer(model)
    for step in here.steps:
        model.train()
        model.module.norm.eval()
        update(model, optimizer, here.batch(step))
        yield


@right()
def frozen_layers(here):
    """The features are frozen before wrapping, and belong to no optimizer."""
    module = Net()
    module.features.requires_grad_(False)
    model = here.wrap(module)
    optimizer = torch.optim.SGD(module.head.parameters(), lr=0.05)
    for step in here.steps:
        update(model, optimizer, here.batch(step))
        yield


@right("tcp")
def a_new_head_and_thawing(here):
    """A new head is trained first; then all ranks thaw the rest, refresh and add a group."""
    module = Net()
    module.features.requires_grad_(False)
    module.head = nn.Linear(8, 1)
    model = here.wrap(module)
    optimizer = torch.optim.SGD(module.head.parameters(), lr=0.05)
    for step in here.steps:
        if step == 4 and not here.is_torch:
            module.features.requires_grad_(True)
            model.refresh()
            optimizer.add_param_group({"params": list(module.features.parameters()), "lr": 0.01})
        update(model, optimizer, here.batch(step))
        yield


class Routed(nn.Module):
    """A branch for each kind of batch."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(Net(seed=seed) for seed in range(2))

    def forward(self, x, branch):
        return self.branches[branch](x)


@right()
def branches_that_differ_on_ranks(here):
    """With ``find_unused_parameters``, each rank takes another branch."""
    model = here.wrap(Routed(), find_unused_parameters=True)
    optimizer = here.optimizer(model)
    for step in here.steps:
        x, y = here.batch(step)
        optimizer.zero_grad()
        (model(x, (step + here.rank) % 2) - y).square().mean().backward()
        optimizer.step()
        yield


@right()
def a_table_of_each_rank(here):
    """Parameters that the wrapper is told to ignore differ by design."""
    module = Net()
    module.own = nn.Linear(4, 1)
    with torch.no_grad():
        module.own.weight.add_(here.rank)
    names = ["own.weight", "own.bias"]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    model = here.wrap(module)
    optimizer = here.optimizer(model)
    for step in here.steps:
        x, y = here.batch(step)
        optimizer.zero_grad()
        (model(x) + module.own(x) - y).square().mean().backward()
        optimizer.step()
        yield


class WordsAndCounts(nn.Module):
    """A tied table, a sparse one, and a buffer that counts."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 4)
        self.out = nn.Linear(4, 12, bias=False)
        self.out.weight = self.table.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, words):
        self.seen += 1
        return self.out(self.table(words).mean(1))


@right()
def tied_weights_and_counters(here):
    """Two layers share a parameter; a buffer counts forwards; shapes differ on ranks."""
    model = here.wrap(WordsAndCounts())
    optimizer = here.optimizer(model, torch.optim.AdamW, lr=0.01)
    for step in here.steps:
        randomness = here.own_randomness(step)
        words = torch.randint(0, 12, (3, 4 + (step + here.rank) % 3), generator=randomness)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(words), words[:, 0]).backward()
        optimizer.step()
        yield


@right("tcp")
def two_models_that_share_an_encoder(here):
    """Two wrappers, whose modules have a layer in common, take turns."""
    shared = Net()
    heads = [nn.Sequential(shared.features, nn.Tanh(), nn.Linear(8, 1)) for _ in range(2)]
    models = [here.wrap(head) for head in heads]
    optimizers = [here.optimizer(model) for model in models]
    for step in here.steps:
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, here.batch(step)).backward()
            optimizer.step()
        yield


@right()
def a_graph_that_is_recorded(here):
    """``static_graph=True``."""
    yield from train(here, Net(), static_graph=True)


@right()
def half_precision(here):
    """Autocast in bfloat16, and a model whose parameters are doubles."""
    model = here.wrap(Net().double())
    optimizer = here.optimizer(model, torch.optim.Adam, lr=0.01)
    for step in here.steps:
        x, y = here.batch(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(model(x.double()), y.double())
        loss.backward()
        optimizer.step()
        yield


@right()
def a_scripted_model(here):
    """TorchScript, which has no hooks for loading."""
    yield from train(here, torch.jit.script(Net()))


class WithReference(nn.Module):
    """As peft's ``set_adapter`` does: what is used requires a gradient, and nothing else."""

    def __init__(self):
        super().__init__()
        self.own, self.reference = Net(), Net(seed=2)
        self.use(self.own)

    def use(self, part):
        self.used = [part]  # in a list, since it is a module already
        for each in (self.own, self.reference):
            each.requires_grad_(each is part)

    def forward(self, x):
        return self.used[0](x)


@right()
def an_adapter_for_references(here):
    """A forward without gradients, through the wrapper, by what is frozen in training."""
    net = WithReference()
    model = here.wrap(net)
    optimizer = here.trained(torch.optim.SGD(net.own.parameters(), lr=0.05), model)
    for step in here.steps:
        x, _ = here.batch(step)
        net.use(net.reference)
        with torch.no_grad():
            wanted = model(x)
        net.use(net.own)
        update(model, optimizer, (x, wanted))
        yield
