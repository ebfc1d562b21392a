"""Algorithms of papers: adversaries, contrast, meta-learning, teachers."""

import copy

import torch
from torch import nn

from tests.mistakes.here import Net, loss_of
from tests.mistakes.right.known import right


def generator_and_critic(here):
    generator = here.wrap(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4)))
    critic = here.wrap(Net(seed=2))
    return generator, critic, here.optimizer(generator), here.optimizer(critic)


def improve(critic, optimizer, real, fake):
    optimizer.zero_grad()
    (critic(real).mean() - critic(fake.detach()).mean()).backward()
    optimizer.step()


def noise(here, step):
    return torch.randn(4, 2, generator=torch.Generator().manual_seed(7 * step + here.rank))


@right("tcp")
def gan_with_the_bare_critic(here):
    """The generator's loss goes through ``critic.module``, whose gradients are thrown away."""
    generator, critic, of_generator, of_critic = generator_and_critic(here)
    for step in here.steps:
        fake = generator(noise(here, step))
        improve(critic, of_critic, here.batch(step)[0], fake)
        of_generator.zero_grad()
        critic.module(fake).mean().backward()
        of_generator.step()
        yield


@right()
def gan_with_the_wrapped_critic(here):
    """As pytorch/examples does: both models through their wrappers, critic's gradients zeroed."""
    generator, critic, of_generator, of_critic = generator_and_critic(here)
    for step in here.steps:
        critic.zero_grad()
        critic(here.batch(step)[0]).mean().backward()
        fake = generator(noise(here, step))
        (-critic(fake.detach()).mean()).backward()
        of_critic.step()
        generator.zero_grad()
        critic(fake).mean().backward()
        of_generator.step()
        yield


@right()
def gan_that_freezes_its_critic(here):
    """As CycleGAN does: ``requires_grad`` of the critic is off in the generator's step."""
    generator, critic, of_generator, of_critic = generator_and_critic(here)
    for step in here.steps:
        fake = generator(noise(here, step))
        for parameter in critic.parameters():
            parameter.requires_grad_(False)
        of_generator.zero_grad()
        critic.module(fake).mean().backward()
        of_generator.step()
        for parameter in critic.parameters():
            parameter.requires_grad_(True)
        improve(critic, of_critic, here.batch(step)[0], fake)
        yield


@right()
def wgan_with_gradient_penalty(here):
    """Three steps of the critic for one of the generator, with a penalty on its gradients."""
    generator, critic, of_generator, of_critic = generator_and_critic(here)
    for step in here.steps:
        for number in range(3):
            of_critic.zero_grad()
            real = here.batch(10 * step + number)[0]
            with torch.no_grad():
                fake = generator(noise(here, 10 * step + number))
            between = real.lerp(fake, 0.3).requires_grad_(True)
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            (critic(fake).mean() - critic(real).mean() + penalty).backward()
            of_critic.step()
        of_generator.zero_grad()
        (-critic.module(generator(noise(here, step))).mean()).backward()
        of_generator.step()
        yield


@right()
def wgan_that_clamps_its_weights(here):
    """Weights are clamped after each step, on all ranks."""
    generator, critic, of_generator, of_critic = generator_and_critic(here)
    for step in here.steps:
        fake = generator(noise(here, step))
        improve(critic, of_critic, here.batch(step)[0], fake)
        for parameter in critic.parameters():
            parameter.data.clamp_(-0.05, 0.05)
        of_generator.zero_grad()
        critic.module(fake).mean().backward()
        of_generator.step()
        yield


@right("tcp")
def ppo(here):
    """Rollouts through the module without gradients, then epochs of minibatches."""
    model = here.wrap(Net())
    optimizer = here.optimizer(model, torch.optim.Adam, lr=0.01)
    for step in here.steps:
        x, y = here.batch(step, rows=8)
        with torch.no_grad():
            before = model.module(x)
        for _ in range(3):
            for rows in torch.randperm(8, generator=here.own_randomness(step)).split(4):
                optimizer.zero_grad()
                ratio = (model(x[rows]) - before[rows]).exp()
                advantage = (y - before)[rows]
                torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            divergence = here.all_reduce((model.module(x) - before).square().mean().detach())
            if divergence > 0.001 * here.world:
                break
        yield


def sharpness_aware(here, first_is_local):
    model = here.wrap(Net())
    optimizer = here.optimizer(model, momentum=0.9)
    for step in here.steps:
        optimizer.zero_grad()
        if first_is_local:
            with model.no_sync():
                loss_of(model, here.batch(step)).backward()
        else:
            loss_of(model, here.batch(step)).backward()
        old = [parameter.data.clone() for parameter in model.parameters()]
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm() + 1e-12
            for parameter in model.parameters():
                parameter.add_(parameter.grad * (0.05 / norm))
        optimizer.zero_grad()
        loss_of(model, here.batch(step)).backward()
        for parameter, value in zip(model.parameters(), old, strict=True):
            parameter.data = value
        optimizer.step()
        yield


@right("tcp")
def sam(here):
    """Sharpness-aware: the first backward is averaged, too; ``p.data`` is put back."""
    yield from sharpness_aware(here, first_is_local=False)


@right("tcp")
def sam_with_a_local_first_step(here):
    """The advice of its README: weights differ on purpose in the second forward."""
    yield from sharpness_aware(here, first_is_local=True)


@right()
def moco(here):
    """A queue that is a buffer, filled from all ranks, and a momentum encoder within the model."""

    class MoCo(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Linear(4, 3)
            self.key = copy.deepcopy(self.query).requires_grad_(False)
            self.register_buffer("queue", torch.randn(3, 8, generator=torch.Generator()))

        def forward(self, x):
            with torch.no_grad():
                for mean, value in zip(self.key.parameters(), self.query.parameters(), strict=True):
                    mean.lerp_(value, 0.1)
                keys = nn.functional.normalize(self.key(x + 0.01), dim=1)
            queries = nn.functional.normalize(self.query(x), dim=1)
            logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.queue], 1)
            everybody = here.all_reduce(keys.clone()) / here.world
            self.queue = torch.cat([everybody.T, self.queue], 1)[:, :8].contiguous()
            return nn.functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

    model = here.wrap(MoCo())
    optimizer = here.optimizer(model)
    for step in here.steps:
        optimizer.zero_grad()
        model(here.batch(step)[0]).backward()
        optimizer.step()
        yield


@right()
def simclr(here):
    """Two views in one forward; a second loss through ``.module`` in the same backward."""
    model = here.wrap(Net().features)
    optimizer = here.optimizer(model, torch.optim.AdamW, lr=0.01)
    for step in here.steps:
        optimizer.zero_grad()
        x = here.batch(step)[0]
        one, two = nn.functional.normalize(model(torch.cat([x, x + 0.1])), dim=1).chunk(2)
        contrast = nn.functional.cross_entropy(one @ two.T / 0.1, torch.arange(len(x)))
        (contrast + 0.1 * model.module(x).square().mean()).backward()
        optimizer.step()
        yield


@right()
def maml(here):
    """An inner loop of ``autograd.grad``; the outer gradients are averaged by hand."""
    model = here.wrap(Net())
    optimizer = here.optimizer(model)
    for step in here.steps:
        optimizer.zero_grad()
        fast = dict(model.module.named_parameters())
        x, y = here.batch(2 * step)
        inner = nn.functional.mse_loss(torch.func.functional_call(model.module, fast, (x,)), y)
        slopes = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
        fast = {
            name: value - 0.01 * slope
            for (name, value), slope in zip(fast.items(), slopes, strict=True)
        }
        x, y = here.batch(2 * step + 1)
        nn.functional.mse_loss(torch.func.functional_call(model.module, fast, (x,)), y).backward()
        for parameter in model.parameters():
            here.all_reduce(parameter.grad).div_(here.world)
        optimizer.step()
        yield


@right()
def dino(here):
    """The teacher is wrapped, frozen afterwards, and follows the student; a head waits an epoch."""
    student = here.wrap(Net(buffers=True))
    teacher = here.wrap(Net(buffers=True))
    teacher.module.load_state_dict(student.module.state_dict())
    for parameter in teacher.parameters():
        parameter.requires_grad = False
    optimizer = here.optimizer(student, torch.optim.AdamW, lr=0.01)
    for step in here.steps:
        x = here.batch(step)[0]
        with torch.no_grad():
            target = teacher(x)
        optimizer.zero_grad()
        (student(x + 0.1) - target - 0.1).square().mean().backward()
        if step < 3:
            student.module.head.weight.grad = None
        optimizer.step()
        with torch.no_grad():
            for mean, value in zip(
                teacher.module.parameters(), student.module.parameters(), strict=True
            ):
                mean.data.mul_(0.9).add_(value.detach().data, alpha=0.1)
        yield


@right("tcp", "zero1")
def ddpm(here):
    """Diffusion with a moving average of the weights on rank 0 only, and its own noise."""
    model = here.wrap(Net())
    optimizer = here.optimizer(model, torch.optim.AdamW, lr=0.01)
    average = copy.deepcopy(model.module) if here.rank == 0 else None
    randomness = here.own_randomness()
    for step in here.steps:
        x, _ = here.batch(step)
        time = torch.rand(len(x), 1, generator=randomness)
        shift = torch.randn(len(x), 1, generator=randomness)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x * (1 - time) + shift * time), shift).backward()
        optimizer.step()
        if average is not None:
            with torch.no_grad():
                for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(value, 0.1)
        yield


@right("tcp")
def adversarial_inputs(here):
    """Inputs follow the sign of their gradients, by ``autograd.grad`` and by a backward in turn."""
    model = here.wrap(Net())
    optimizer = here.optimizer(model)
    for step in here.steps:
        x, y = here.batch(step)
        x.requires_grad_(True)
        if step % 2:
            (slope,) = torch.autograd.grad(loss_of(model, (x, y)), x)
        else:
            loss_of(model.module, (x, y)).backward()
            slope = x.grad
        optimizer.zero_grad()
        loss_of(model, (x.detach() + 0.05 * slope.sign(), y)).backward()
        optimizer.step()
        yield
