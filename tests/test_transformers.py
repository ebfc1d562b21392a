"""The recipe of docs/frameworks.md for the Trainer of Transformers, on a tiny random model, against
the same trainer as it is, with torch's DDP."""

import importlib.util

import pytest

from tests.ranks import python
from tests.test_docs_code import OF_TRANSFORMERS, blocks

is_missing = importlib.util.find_spec("transformers") is None
pytestmark = [
    pytest.mark.skipif(is_missing, reason="needs transformers: pip install transformers"),
    pytest.mark.usefixtures("mistakes_are_errors"),
]

CHECKS = """
assert isinstance(trainer.model_wrapped, dpcore.DataParallel)
assert trainer.model_wrapped.module is trainer.model is model
syncs = trainer.model_wrapped._reducer.completed
trainer.train()  # once more: what is wrapped stays as it is
assert trainer.model_wrapped._reducer.completed == syncs + 3
torch.manual_seed(0)
before = GPT2LMHeadModel(config)
torch.manual_seed(0)
assert trainer.model_wrapped.find_unused_parameters  # the Trainer's default
theirs = Trainer(GPT2LMHeadModel(config), options, train_dataset=rows)
theirs.train()
theirs.train()
assert type(theirs.model_wrapped) is torch.nn.parallel.DistributedDataParallel
expected = theirs.model.state_dict()
torch.testing.assert_close(dict(model.state_dict()), dict(expected))
assert not torch.equal(before.transformer.wte.weight, expected["transformer.wte.weight"])
print(syncs, trainer.evaluate(rows)["eval_loss"] > 0)
"""


def test_the_trainer_of_the_documents(tmp_path):
    """A step is two batches on each of two ranks."""
    script = tmp_path / "train.py"
    script.write_text(blocks()[OF_TRANSFORMERS] + CHECKS)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--log-dir", str(tmp_path / "said"), "--redirects", "3", str(script)]
    run = python.run(*command, capture_output=True, text=True, timeout=180, cwd=tmp_path)
    logs = [*tmp_path.rglob("stdout.log"), *tmp_path.rglob("stderr.log")]
    said = "".join(f"{path.relative_to(tmp_path)}:\n{path.read_text()}\n" for path in logs)
    assert run.returncode == 0, f"{run.returncode}: {run.stderr}\n{said}"
    for path in tmp_path.rglob("stdout.log"):
        assert path.read_text().splitlines()[-1] == "3 True"
