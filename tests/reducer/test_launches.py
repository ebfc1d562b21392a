"""The named launch schedules: those in C++ are their twins in plain Python, call by call."""

import random
import subprocess
from contextlib import contextmanager

import pytest
import torch

import dpcore
from dpcore.reference.launch_schedule import EVENTS
from dpcore.reference.launches import ACROSS_STEPS, SCHEDULES, make_launch_schedule
from tests.cpp import programs

BUCKETS = 7
STEPS = 3


class Control:
    """A reducer whose operations are over at random moments. ``log`` has what a schedule calls."""

    buckets = BUCKETS

    def __init__(self, seed, phases):
        self.random = random.Random(seed)
        self.phases = phases
        self.log = []
        self.need = self.random.sample(range(BUCKETS), BUCKETS - self.random.randint(0, 1))
        # The first gradient of each bucket, and one that comes sparse.
        self.modules = [[bucket, BUCKETS] for bucket in self.need]

    def begin(self):
        self.at = dict.fromkeys(range(BUCKETS), 0)
        self.flying = set()  # buckets with an operation that nothing has waited for
        self.over = set()  # those that were seen to be

    def bucket_of(self, gradient):
        return gradient if gradient < BUCKETS else None

    def gradients_of_module(self, module):
        return self.modules[module]

    def order_of_need(self):
        return self.need

    def next_phase(self, bucket):
        return self.phases[self.at[bucket]] if self.at[bucket] < len(self.phases) else None

    def is_over(self, bucket):
        if bucket in self.flying and bucket not in self.over and self.random.random() < 0.4:
            self.over.add(bucket)
        answer = bucket not in self.flying or bucket in self.over
        self.log.append(f"is_over {bucket}: {answer}")
        return answer

    def launch(self, bucket, priority=0, background=True):
        self.log.append(f"launch {bucket} {priority} {int(background)}")
        self.flying.add(bucket)
        self.over.discard(bucket)

    def wait(self, bucket):
        self.log.append(f"wait {bucket}")
        if bucket in self.flying:
            self.flying.remove(bucket)
            is_both = self.at[bucket] == 0 and self.phases[1:2] == ["all_gather"]
            self.at[bucket] += 2 if is_both else 1

    def wait_for_all(self):
        self.log.append("wait_for_all")

    def skip(self, bucket):
        self.log.append(f"skip {bucket}")

    def update(self, buckets):
        buckets = [buckets] if isinstance(buckets, int) else buckets
        self.log.append(f"update {','.join(map(str, buckets))}")
        for bucket in buckets:
            assert self.next_phase(bucket) == "update"
            self.at[bucket] += 1


def events(seed):
    """Of some steps: buckets get ready in any order, and forward may leave out modules."""
    of = random.Random(seed)
    for _ in range(STEPS):
        yield "begin", ()
        yield from (("bucket_ready", (bucket,)) for bucket in of.sample(range(BUCKETS), BUCKETS))
        yield "backward_end", ()
        yield "optimizer_step", ()
        for module in of.sample(range(BUCKETS - 1), BUCKETS - 1 - of.randint(0, 2)):
            yield "forward_begin", (module,)


def calls_of(control, listens, tell, seed):
    for event, arguments in events(seed):
        control.log.append(f"{event} {arguments}")
        if event == "begin":
            control.begin()
        elif event in listens:
            tell(event, arguments)
    return control.log


def in_words(answer):
    if isinstance(answer, list):
        return " ".join(map(str, answer))
    return "" if answer is None else str(int(answer) if isinstance(answer, bool) else answer)


@contextmanager
def in_cpp(name):
    """The schedule in C++: what it says of itself, and a function that tells it an event."""
    with subprocess.Popen(
        [programs.built("asan/launches"), name, str(BUCKETS)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip

        def say(words):
            process.stdin.write(words + "\n")
            process.stdin.flush()

        def tell(control, event, arguments):
            say(" ".join([event, *map(str, arguments)]))
            while (line := process.stdout.readline().rstrip("\n")) != "done":
                assert line, "the program has ended"
                say(in_words(_answer(control, *line.split(" "))))

        yield [process.stdout.readline().split() for _ in range(3)], tell
        process.stdin.close()
    assert process.returncode == 0


def _answer(control, call, *words):
    if call == "buckets":
        return control.buckets
    if call == "update":
        return control.update([int(word) for word in words[0].split(",") if word])
    return getattr(control, call)(*map(int, words))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", [*SCHEDULES, *ACROSS_STEPS])
def test_twins_make_the_same_calls(name, seed):
    twin = make_launch_schedule(name)
    mine = Control(seed, twin.phases())
    theirs = Control(seed, twin.phases())
    listens = twin.listens_to()
    expected = calls_of(
        mine, listens, lambda event, arguments: getattr(twin, event)(mine, *arguments), seed
    )
    with in_cpp(name) as (said, tell):
        found = calls_of(theirs, listens, lambda *event: tell(theirs, *event), seed)
    assert found == expected
    assert len(expected) > STEPS * (2 + BUCKETS)
    (events_bits, is_exact, whole_buckets, *phases), (_, *caps), (_, *order) = said
    numbers = {"gradient_ready": 1, "bucket_ready": 2, "backward_end": 4, "forward_begin": 8,
               "optimizer_step": 16, "bucket_complete": 32, "slice_complete": 64}  # fmt: skip
    assert set(numbers) == set(EVENTS)
    assert int(events_bits) == sum(numbers[event] for event in listens)
    assert bool(int(is_exact)) == twin.is_exact()
    assert int(whole_buckets) == twin.whole_buckets()
    assert phases == twin.phases()
    assert [min(int(cap), 1 << 62) for cap in caps] == twin.caps([100, 200])
    assert list(map(int, order)) == list(twin.order(BUCKETS))


def test_another_schedule_makes_other_calls():
    """Else the log would not tell schedules apart."""
    logs = {}
    for name in (*SCHEDULES, *ACROSS_STEPS):
        twin = make_launch_schedule(name)
        control = Control(1, twin.phases())
        logs[name] = tuple(
            calls_of(
                control, twin.listens_to(),
                lambda event, arguments, twin=twin, control=control: getattr(twin, event)(
                    control, *arguments
                ), 1,
            )
        )  # fmt: skip
    alike = (("bucketed", "per_parameter", "flat"), ("zero1", "zero2"))  # they differ in sizes
    for names in alike:
        assert len({logs[name] for name in names}) == 1
    assert len(set(logs.values())) == len(logs) - sum(len(names) - 1 for names in alike)


@pytest.mark.parametrize("name", [*SCHEDULES[:4], *ACROSS_STEPS])
def test_training_with_the_twin_gives_the_same_bits(name):
    def weights(comm, schedule):
        torch.manual_seed(1)
        layers = [torch.nn.Sequential(torch.nn.Linear(24, 24), torch.nn.Tanh()) for _ in range(5)]
        model = dpcore.DataParallel(
            torch.nn.Sequential(*layers), comm=comm, schedule=schedule, bucket_cap_mb=0.002,
            deterministic=True,
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if name in ACROSS_STEPS:
            optimizer = dpcore.DistributedOptimizer(optimizer, model)
        for step in range(4):
            batch = torch.randn(8, 24, generator=torch.Generator().manual_seed(step + comm.rank))
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([value.flatten().clone() for value in model.state_dict().values()])

    def body(comm):
        named, twin = weights(comm, name), weights(comm, make_launch_schedule(name))
        assert torch.equal(named, twin)
        return len(named)

    assert dpcore.spawn(body, 2)[0] > 0
