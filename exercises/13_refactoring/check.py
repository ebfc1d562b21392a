"""Checks of the exercise beside this file.

Data sets note which samples are read, and the functions above ``train`` are wrapped: what they are
given is noted as well. With that, the training is repeated in one process.
"""

import contextlib
import copy
import io
import time

import torch
from torch.utils.data import Dataset

from dpcore.school.exercise.judging import need, need_values

ALLOWED = None  # DataParallel needs a whole communicator
OPEN = ("DataParallel",)
TRAIN, TEST, EPOCHS, BATCH = 192, 75, 3, 32  # 75: ranks have different shares
MANY = 8  # epochs, of which some are not the best so far
WORLDS = (1, 2)
MARK = 8.0  # on all biases of the last layer, in the file: it changes no prediction


class Noting(Dataset):
    """Points of four classes; ``read`` has the numbers of those that were asked for."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 4, (count,), generator=generator)
        centres = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
        self.x = centres[self.y] + 0.8 * torch.randn(count, 8, generator=generator)
        self.read = []

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        self.read.append(int(index))
        return self.x[index], self.y[index]


def copied(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def trains(on, student, epochs=EPOCHS):
    train_set, test_set = Noting(TRAIN, 1), Noting(TEST, 2)
    path = on.folder / "best.pt"
    found = {"steps": [], "local_losses": [], "noise": [], "writes": 0, "early": False}
    made, loss_of, noise_of, save = (
        student.make_model, student.loss_of, student.add_noise, student.save
    )  # fmt: skip

    def noted_model():
        found["model"] = made()
        found["begin"] = copied(found["model"])
        return found["model"]

    def noted_loss(model, x, y):
        loss = loss_of(model, x, y)
        found["steps"].append([x.clone(), y.clone()])
        found["local_losses"].append(loss.item())
        return loss

    def noted_noise(x, generator):
        noisy = noise_of(x, generator)
        found["noise"].append(noisy - x)
        return noisy

    def slow_save(model, to):
        found["writes"] += 1
        state = copy.deepcopy(model)
        with torch.no_grad():
            list(state.parameters())[-1].add_(MARK)
        if on.world_size > 1:
            time.sleep(0.2)  # a file system takes its time
        save(state, to)

    student.make_model, student.loss_of = noted_model, noted_loss
    student.add_noise, student.save = noted_noise, slow_save
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), on.watch() as seen:
        model, losses, accuracies = student.train(on.comm, train_set, test_set, path, epochs)
    begin, steps = found["begin"], found["steps"]
    with torch.no_grad():
        bias = list(model.parameters())[-1]
        has_read = bool((bias > MARK / 2).all())
        bias -= MARK * has_read
        right = [
            int((model(x[None]).argmax(1) == y).item())
            for x, y in zip(test_set.x, test_set.y, strict=True)
        ]
    return {
        "begin": begin,
        "has_read": has_read,
        "end": copied(model),
        "steps": steps,
        "noise": found["noise"],
        "local_losses": found["local_losses"],
        "losses": losses,
        "accuracies": accuracies,
        "accuracy_of_end": sum(right) / TEST,
        "writes": found["writes"],
        "printed": printed.getvalue(),
        "train_read": train_set.read,
        "test_read": test_set.read,
        "sent_bytes": sum(nbytes for _, nbytes in seen.sent("all_reduce")),
    }


def runs(lab):
    return {world: lab.ranks("trains", world) for world in WORLDS}


def of_epochs(read, count):
    """What was read, cut into epochs."""
    size = len(read) // count
    return [read[epoch * size : (epoch + 1) * size] for epoch in range(count)]


def repeated(ranks):
    """The parameters after each epoch, when one process makes every step with what all ranks were
    given, from the values of rank 0."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), ranks[0]["begin"], strict=True):
            parameter.copy_(torch.from_numpy(value))
    found = []
    steps = len(ranks[0]["steps"])
    for step in range(steps):
        model.zero_grad()
        for rank in ranks:
            x, y = (torch.from_numpy(part) for part in rank["steps"][step])
            (torch.nn.functional.cross_entropy(model(x), y) / len(ranks)).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.2 * parameter.grad
        if (step + 1) % (steps // EPOCHS) == 0:
            found.append([value.numpy() for value in copied(model)])
    return found


def check_gradients(lab):
    """TODO 1: ranks end with the model that one process makes of the same batches."""
    for world, ranks in runs(lab).items():
        need(
            len({len(rank["steps"]) for rank in ranks}) == 1,
            f"ranks made {[len(rank['steps']) for rank in ranks]} steps",
        )
        steps, model = len(ranks[0]["steps"]), sum(value.nbytes for value in ranks[0]["begin"])
        need(
            world == 1 or ranks[0]["sent_bytes"] >= steps * model,
            f"{ranks[0]['sent_bytes']} bytes were all-reduced in {steps} steps, and there are "
            f"{model} bytes of gradients in each",
        )
        accuracies = ranks[0]["accuracies"]
        best = max(epoch for epoch in range(EPOCHS) if accuracies[epoch] == max(accuracies))
        expected = repeated(ranks)[best]
        for rank, found in enumerate(ranks):
            what = f"rank {rank} of {world}, model of epoch {best}"
            need_values(found["end"], expected, what, tolerance=1e-4)


def check_noise(lab):
    """TODO 2: ranks begin with the same model and add different noise."""
    one, other = lab.ranks("trains", 2)
    need_values(other["begin"], one["begin"], "the model of rank 1 at the beginning")
    same = sum(
        a.shape == b.shape and (abs(a - b) < 1e-6).all()
        for a, b in zip(one["noise"], other["noise"], strict=False)
    )
    need(not same, f"in {same} of {len(one['noise'])} steps, both ranks add the same noise")


def check_shares(lab):
    """TODO 3: in each epoch, every sample is used once over all ranks."""
    for world, ranks in runs(lab).items():
        for epoch, parts in enumerate(
            zip(*(of_epochs(rank["train_read"], EPOCHS) for rank in ranks), strict=True)
        ):
            used = sorted(sample for part in parts for sample in part)
            twice = len(used) - len(set(used))
            need(not twice, f"{world} ranks, epoch {epoch}: {twice} samples are used again")
            need(
                len(used) == TRAIN,
                f"{world} ranks, epoch {epoch}: {len(used)} samples are used, of {TRAIN}",
            )


def check_batch(lab):
    """TODO 4: a step has as many samples over all ranks as it had in one process."""
    for world, ranks in runs(lab).items():
        sizes = {sum(len(rank["steps"][step][1]) for rank in ranks) for step in range(3)}
        need(sizes == {BATCH}, f"{world} ranks: steps of {sorted(sizes)} samples, and not {BATCH}")


def check_test_shares(lab):
    """TODO 5: in each epoch, every test sample is used once over all ranks."""
    for world, ranks in runs(lab).items():
        used = sorted(sample for rank in ranks for sample in rank["test_read"])
        expected = sorted(list(range(TEST)) * EPOCHS)
        need(
            used == expected,
            f"{world} ranks: {len(used)} tests in {EPOCHS} epochs, and {len(expected)} are right",
        )


def check_set_epoch(lab):
    """TODO 6: the order of samples is another one in each epoch."""
    for world, ranks in runs(lab).items():
        first, second, _ = of_epochs(ranks[0]["train_read"], EPOCHS)
        need(first != second, f"{world} ranks: epochs 0 and 1 have the same order")


def check_losses(lab):
    """TODO 7: all ranks report the mean loss of all ranks."""
    for world, ranks in runs(lab).items():
        steps = len(ranks[0]["local_losses"]) // EPOCHS
        for epoch in range(EPOCHS):
            local = [
                sum(rank["local_losses"][epoch * steps : (epoch + 1) * steps]) / steps
                for rank in ranks
            ]
            expected = sum(local) / world
            for number, rank in enumerate(ranks):
                found = rank["losses"][epoch]
                need(
                    abs(found - expected) < 1e-4 * expected,
                    f"rank {number} of {world}, epoch {epoch}: loss {found:.6f}, and the mean of "
                    f"{[round(loss, 6) for loss in local]} is {expected:.6f}",
                )


def check_accuracies(lab):
    """TODO 8: all ranks report the accuracy over all test samples."""
    for world, ranks in runs(lab).items():
        for number, rank in enumerate(ranks):
            best, right = max(rank["accuracies"]), rank["accuracy_of_end"]
            need(
                abs(best - right) < 1e-6,
                f"rank {number} of {world}: {best:.4f} is the best that was reported, and the "
                f"model that came back has {right:.4f}",
            )
            need(
                rank["accuracies"] == ranks[0]["accuracies"],
                f"rank 0 reports {ranks[0]['accuracies']}, rank {number} {rank['accuracies']}",
            )


def check_one_writes(lab):
    """TODO 9: rank 0 prints a line for each epoch and writes the file; the others do neither."""
    for world, ranks in runs(lab).items():
        lines = [len(rank["printed"].splitlines()) for rank in ranks]
        need(lines == [EPOCHS] + [0] * (world - 1), f"{world} ranks print {lines} lines")
        writes = [rank["writes"] for rank in ranks]
        need(writes[0] >= 1 and not any(writes[1:]), f"{world} ranks write {writes} times")


def check_best(lab):
    """TODO 9: the file is written in the best epochs only, so ranks end with the best model."""
    for rank, found in enumerate(lab.ranks("trains", 2, MANY)):
        reported = found["accuracies"]
        bests = [epoch for epoch in range(MANY) if reported[epoch] == max(reported[: epoch + 1])]
        need(
            rank or found["writes"] <= len(bests),
            f"rank 0 writes {found['writes']} times in {MANY} epochs, and {len(bests)} of them "
            "were the best so far",
        )
        need(
            abs(max(reported) - found["accuracy_of_end"]) < 1e-6,
            f"rank {rank}: {max(reported):.4f} is the best that was reported in {MANY} epochs, "
            f"and the model that came back has {found['accuracy_of_end']:.4f}",
        )


def check_reads_later(lab):
    """TODO 10: all ranks come back with the model that was written last."""
    one, other = lab.ranks("trains", 2)
    need_values(other["end"], one["end"], "the model that rank 1 has read")
    for rank, found in enumerate((one, other)):
        need(found["has_read"], f"rank {rank} comes back with a model that is not the file's")


def check_alone(lab):
    """With one rank, losses and accuracies are those of the script as it was, shuffled anew in
    each epoch."""
    (found,) = lab.ranks("trains", 1)
    (expected,) = lab.ranks("alone", 1, alone=True)
    for name in ("losses", "accuracies"):
        came, right = (", ".join(f"{one:.7g}" for one in of[name]) for of in (found, expected))
        need(
            len(found[name]) == len(expected[name])
            and all(
                abs(one - other) <= 1e-5 * abs(other)
                for one, other in zip(found[name], expected[name], strict=True)
            ),
            f"{name} {came}, and {right} are right",
        )


def alone(on, _):
    """The script for one process, once more."""
    from torch.utils.data import DataLoader, DistributedSampler

    train_set, test_set = Noting(TRAIN, 1), Noting(TEST, 2)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    noise = torch.Generator().manual_seed(1)
    sampler = DistributedSampler(train_set, 1, 0, shuffle=True, seed=1)
    batches = DataLoader(train_set, BATCH, sampler=sampler)
    losses, accuracies = [], []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for x, y in batches:
            model.zero_grad()
            noisy = x + 0.1 * torch.randn(x.shape, generator=noise)
            loss = torch.nn.functional.cross_entropy(model(noisy), y)
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.2 * parameter.grad
            total += loss.detach()
        losses.append((total / len(batches)).item())
        with torch.no_grad():
            tests = DataLoader(test_set, BATCH)
            correct = sum(int((model(x).argmax(1) == y).sum()) for x, y in tests)
        accuracies.append(correct / TEST)
    return {"losses": losses, "accuracies": accuracies}
