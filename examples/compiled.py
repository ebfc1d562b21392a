"""The same model three times over an emulated link: eager, and compiled before and after wrapping.

python examples/compiled.py

A graph that exists before the model is wrapped has nothing in it that lets gradients leave early.
"""

import warnings

import torch

import dpcore
from dpcore import Communicator


class Block(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def train(comm: Communicator) -> list[str]:
    torch.set_num_threads(1)
    batch, lines = torch.randn(64, 256), []
    for how in ("eager", "compiled before wrapping", "compiled after wrapping"):
        torch._dynamo.reset()
        blocks = torch.nn.ModuleList(Block(256, 256, bias=False) for _ in range(6))

        class Model(torch.nn.Module):
            def __init__(self, blocks: torch.nn.ModuleList = blocks) -> None:
                super().__init__()
                self.blocks = blocks

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for block in self.blocks:
                    x = block(x)
                return x

        module = Model()
        if how == "compiled before wrapping":
            torch.compile(module)(batch).sum().backward()
        model = dpcore.DataParallel(module, comm=comm, schedule="bucketed", bucket_cap_mb=0.25)
        run = model if how == "eager" else torch.compile(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the second one is late
            for _ in range(4):
                model.zero_grad()
                run(batch).square().mean().backward()
        report = model.bucket_report()
        sent = [bucket.launched_ms for bucket in report if bucket.launched_ms is not None]
        notes = [note.partition(",")[0] for note in report.notes if "compile" in note]
        note = notes[0] if notes else "autograd brings gradients one by one"
        lines.append(f"{how:26}{sent[0]:7.2f} to {sent[-1]:6.2f} ms  {note}")
    return lines


print(f"{'':26}{'buckets were sent':>20}")
print(*dpcore.spawn(train, 2, link="1gbit,50us")[0], sep="\n")
