"""The Python in the documents: shown from the code, run by two ranks, or at least compiled.

Code between the marks of tools/snippets.py is the code's, and test_docs.py runs what the lessons
begin with. Every other block has a row here: what it prints when two ranks run it, or why it cannot
run without a GPU.
"""

import ast
import inspect
import re
import shlex
import tempfile
from pathlib import Path

import pytest

import dpcore as dp
from dpcore import BackendOptions
from dpcore.base.link import parse_speed
from dpcore.tools.show import figures_of, read_run
from dpcore.tools.show.reading import read_runs
from tests.faults.tries import in_time, three_tries
from tests.ranks import python
from tests.ranks.mpi import each_mpi, mpirun, needs_mpi

pytestmark = pytest.mark.usefixtures("mistakes_are_errors")
ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
SHOWN = re.compile(r"<!-- code: .*?<!-- end -->", re.DOTALL)

RUN = {  # what each rank prints
    ("across_steps.md", 0): r"",
    ("compare.md", 0): r"",
    ("compare.md", 1): r"",
    ("data_parallel.md", 0): r"",
    ("data_parallel.md", 1): r"",
    ("frameworks.md", 0): r"[\s\S]*",  # Lightning's bar
    ("frameworks.md", 1): r"torch.Size\(\[1, 3\]\)\n",
    ("local_updates.md", 0): r"True\n",
    ("local_updates.md", 1): r"",
    ("parallel.md", 0): r"torch.Size\(\[4, 8\]\) torch.Size\(\[1, 2, 16, 8\]\) bubble 27.3%\n",
    ("parallel.md", 1): r"torch.Size\(\[8, 8\]\)\n",
    ("noise_scale.md", 0): r"gradient noise scale .+ samples \(95%: .+ to .+\), 50 steps\n",
    ("notebooks.md", 0): r"\[0, 10\]\n",
    ("monitor.md", 0): r"(step 16: .+\nstep 20: .+\nstep 40: .+\n)?",
    ("performance.md", 0): r"",
    ("research.md", 0): r"",
    ("show.md", 0): r"",
    ("variables.md", 0): r"",
    ("network.md", 0): r"2 after [\d.]+ ms\n",
    ("torch_distributed.md", 0): r"dpcore 2\.0\n",
    ("torch_distributed.md", 1): r"",
}
UNDER_MPIEXEC = {("mpi.md", 0): "mpi 1 all-reduce"}
OF_TRANSFORMERS = ("frameworks.md", 2)  # by test_transformers.py
ON_A_GPU = {("gpu.md", 0)}
OF_LESSONS = {  # by test_docs.py
    (f"learn/{path.name}", 0)
    for path in DOCS
    if path.parent.name == "learn" and "<!-- printed:" in path.read_text()
}


def blocks():
    found = {}
    for path in DOCS:
        own = SHOWN.sub("", path.read_text())
        codes = re.findall(r"^```python\n(.*?)^```", own, re.MULTILINE | re.DOTALL)
        name = path.relative_to(ROOT / "docs").as_posix()
        found |= {(name, number): code for number, code in enumerate(codes)}
    return found


def test_every_block_of_code_is_tried():
    python_lessons = {block for block in OF_LESSONS if block in blocks()}
    elsewhere = ON_A_GPU | python_lessons | {OF_TRANSFORMERS}
    assert set(blocks()) == set(RUN) | set(UNDER_MPIEXEC) | elsewhere


@pytest.mark.parametrize("block", RUN, ids=lambda block: f"{block[0]}-{block[1]}")
@three_tries
def test_two_ranks_run_it(block, tmp_path):
    for framework in re.findall(r"^from (lightning|accelerate)", blocks()[block], re.MULTILINE):
        pytest.importorskip(framework)
    script = tmp_path / "shown.py"
    script.write_text(blocks()[block])
    said = Path(tempfile.mkdtemp(dir=tmp_path))  # a file for each rank: their lines would mix
    command = ["-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--log-dir", str(said), "--redirects", "3", str(script)]
    run = python.run(*command, capture_output=True, text=True, timeout=180, cwd=tmp_path)
    errors = "".join(path.read_text() for path in said.rglob("stderr.log"))
    assert run.returncode == 0, run.stderr + errors
    outputs = [path.read_text() for path in said.rglob("stdout.log")]
    assert len(outputs) == 2
    for output in outputs:
        assert re.fullmatch(RUN[block], output), shlex.quote(output)
    if block[0] == "performance.md":
        figures = figures_of(read_run(tmp_path / "run.json"))
        assert (figures.world_size, figures.steps) == (2, 5)
    if block[0] == "show.md":
        of_profiler = read_runs([tmp_path / "rank0.json", tmp_path / "rank1.json"])
        for run in (read_run(tmp_path / "run.json"), *of_profiler):
            figures = figures_of(run)
            assert (figures.world_size, figures.steps, run.transport) == (2, 5, "gloo")
            # All that this model sends is exposed, and the time until its thread has woken up.
            assert figures.exposed_ms > 0
            in_time(figures.exposed_ms < 1.5 * figures.communication_ms)
    if block[0] == "network.md":
        assert all(float(output.split()[2]) > 7.9 for output in outputs)  # 1 MB at 125 MB/s


@needs_mpi
@each_mpi
@pytest.mark.parametrize("block", UNDER_MPIEXEC, ids=lambda block: f"{block[0]}-{block[1]}")
def test_mpiexec_runs_it(block, launcher, tmp_path):
    run, _ = mpirun(tmp_path, blocks()[block], launcher)
    assert run.returncode == 0, run.stderr
    said = "".join(run.stdout.split())
    assert sorted(said) == sorted("".join(UNDER_MPIEXEC[block].split()) * 2)  # lines mix


@pytest.mark.parametrize("block", sorted(ON_A_GPU), ids=lambda block: f"{block[0]}-{block[1]}")
def test_what_needs_a_gpu_names_what_is_there(block):
    """Every function and argument of ours; what ``comm`` is made by ``dp.init``."""
    things = {"dp": dp, "comm": dp.Communicator}
    calls = [node for node in ast.walk(ast.parse(blocks()[block])) if isinstance(node, ast.Call)]
    checked = 0
    for call in calls:
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
            owner = things.get(call.func.value.id)
            if owner is not None:
                function = getattr(owner, call.func.attr)
                accepted = inspect.signature(function).parameters
                assert {word.arg for word in call.keywords} <= set(accepted), ast.unparse(call)
                checked += 1
    assert checked >= 4


def test_links_that_the_documents_name_are_understood():
    words = {
        word
        for path in [*DOCS, ROOT / "README.md"]
        for word in re.findall(r'"(\d+[kmg]?bit(?:,[^"]*)?)"', path.read_text())
    }
    assert {"1gbit,50us", "10gbit,5us,jitter=2us,loss=0.1%,seed=7"} <= words
    for word in words:
        assert parse_speed(word).bytes_per_second > 0


def test_options_that_the_documents_name_are_accepted():
    text = (ROOT / "docs" / "torch_distributed.md").read_text()
    for name in re.findall(r'BackendOptions\(cuda="(\w+)"\)  # or "(\w+)"', text)[0]:
        assert BackendOptions(cuda=name).wanted() == name
