"""``%%ranks`` in a real kernel, as a notebook runs it, and what notebooks draw of our objects."""

import asyncio
import importlib.util
import os
import re
import signal
import threading
import time

import pytest

from dpcore.base.processes import is_running

NEEDED = ("nbclient", "nbformat", "ipykernel")
pytestmark = [
    pytest.mark.hurried,
    pytest.mark.skipif(
        None in map(importlib.util.find_spec, NEEDED),
        reason="needs IPython: pip install nbclient ipykernel",
    ),
]


class Said:
    """What a cell has put below itself."""

    def __init__(self, cell):
        outputs = cell.outputs
        streams = [(o.name, o.text) for o in outputs if o.output_type == "stream"]
        self.out = "".join(text for name, text in streams if name == "stdout")
        self.err = "".join(text for name, text in streams if name == "stderr")
        self.errors = [o for o in outputs if o.output_type == "error"]
        self.trace = "\n".join(line for error in self.errors for line in error.traceback)
        data = [o.get("data", {}) for o in outputs]
        self.html = [of["text/html"] for of in data if "text/html" in of]
        self.text = [of["text/plain"] for of in data if "text/html" in of]


class Kernel:
    """A notebook whose cells are run one after the other; errors do not end it."""

    def __init__(self, folder):
        import nbclient
        import nbformat

        self._new_cell = nbformat.v4.new_code_cell
        self._notebook = nbformat.v4.new_notebook()
        resources = {"metadata": {"path": str(folder)}}
        self.client = nbclient.NotebookClient(
            self._notebook, timeout=120, allow_errors=True, resources=resources
        )

    def run(self, source):
        cell = self._new_cell(source)
        self._notebook.cells.append(cell)
        self.client.execute_cell(cell, len(self._notebook.cells) - 1)
        return Said(cell)

    def interrupt_in(self, seconds):
        def later():
            time.sleep(seconds)
            asyncio.run(self.client.km.interrupt_kernel())

        threading.Thread(target=later).start()


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    made = Kernel(tmp_path_factory.mktemp("notebook"))
    with made.client.setup_kernel():
        assert not made.run("%load_ext dpcore").errors
        assert not made.run("%%ranks 2\nhere = rank").errors
        yield made


def ranks_of(kernel):
    found = re.search(r"(\d+) ranks?, processes (.*)", kernel.run("%ranks").out)
    return [int(number) for number in found[2].split(", ")]


def test_ranks_keep_their_variables_and_say_who_prints(kernel):
    first = ranks_of(kernel)
    kernel.run("%%ranks 2\nx = torch.full((3,), float(rank + 1))\ncomm.all_reduce(x)")
    said = kernel.run("%%ranks\nprint(rank, x.tolist())\nprint('no end', end='')\nhere")
    assert sorted(said.out.splitlines()) == sorted(
        f"[{rank}] {text}"
        for rank in range(2)
        for text in (f"{rank} [3.0, 3.0, 3.0]", "no end", str(rank))
    )
    assert kernel.run("%%ranks\nx.tolist()").out == "[all] [3.0, 3.0, 3.0]\n"
    assert kernel.run("%%ranks\nx.tolist();").out == ""
    assert "[1] loud" in kernel.run("%%ranks\nimport sys\nprint('loud', file=sys.stderr)").err
    kernel.run("%%ranks --get here,x\nx *= 2")
    assert kernel.run("print(here, x[1].tolist())").out == "[0, 1] [6.0, 6.0, 6.0]\n"
    missing = kernel.run("%%ranks --get there\n5")
    assert "NameError: no variable there to bring back\n(all ranks)" in missing.trace
    assert "Traceback" not in missing.trace  # nothing of it is in the cell
    assert ranks_of(kernel) == first


def test_a_model_trains_over_several_cells(kernel):
    kernel.run(
        "%%ranks\n"
        "torch.manual_seed(rank)\n"
        "model = dp.DataParallel(torch.nn.Linear(4, 1))\n"
        "class Own(torch.nn.Module):\n    pass\n"
    )
    said = kernel.run(
        "%%ranks\n"
        "model(torch.ones(2, 4) * rank).sum().backward()\n"
        "model.module.weight.grad.tolist()"
    )
    assert said.out == "[all] [[1.0, 1.0, 1.0, 1.0]]\n"


def test_an_error_shows_its_traceback_once(kernel):
    before = ranks_of(kernel)
    everywhere = kernel.run("%%ranks\nkept = 5\ny = undefined + 1")
    assert len(everywhere.errors) == 1
    assert everywhere.trace.count("NameError: name 'undefined' is not defined") == 1
    assert "y = undefined + 1" in everywhere.trace  # its line
    assert "(all ranks)" in everywhere.trace
    assert "dpcore/school/notebook" not in everywhere.trace
    assert kernel.run("%%ranks\nmodel(torch.ones(2, 4)).shape[0]").out == "[all] 2\n"

    begin = time.monotonic()
    alone = kernel.run(
        "%%ranks\nif rank == 1:\n    raise KeyError('mine')\ncomm.all_reduce(torch.ones(3))"
    )
    assert time.monotonic() - begin < 20
    assert len(alone.errors) == 1
    assert alone.trace.count("Traceback") == 1
    assert "KeyError: 'mine'" in alone.trace
    assert "(rank 1 of 2)" in alone.trace
    assert "a new `comm`" in alone.trace
    assert "PeerLost" not in alone.trace
    again = kernel.run("%%ranks\nx = torch.ones(1)\ncomm.all_reduce(x)\n(x.item(), kept)")
    assert again.out == "[all] (2.0, 5)\n"
    assert "SyntaxError" in kernel.run("%%ranks\nx = = 3").trace
    assert ranks_of(kernel) == before


def test_ctrl_c_reaches_the_ranks(kernel):
    before = ranks_of(kernel)
    for waits in ("import time; time.sleep(60)", "comm.recv(torch.ones(1), 1 - rank)"):
        kernel.interrupt_in(1.5)
        begin = time.monotonic()
        said = kernel.run(f"%%ranks\nprint('begun')\n{waits}")
        assert time.monotonic() - begin < 15
        assert sorted(said.out.splitlines()) == ["[0] begun", "[1] begun"]
        assert len(said.errors) == 1
        assert "KeyboardInterrupt" in said.trace
    assert (
        kernel.run("%%ranks\nx = torch.ones(1)\ncomm.all_reduce(x)\nx.item()").out == "[all] 2.0\n"
    )
    assert ranks_of(kernel) == before


def test_what_is_drawn(kernel):
    """On rank 0, in the notebook's own process, and without an extension."""
    training = "for _ in range(3):\n        model(torch.ones(2, 4)).sum().backward()\n"
    said = kernel.run(
        "%%ranks\nmodel = dp.DataParallel(torch.nn.Linear(4, 1))\n"
        f"with dp.trace('run.json') as t:\n    {training}"
        "print(round(t.overlap, 3) <= 1)\nt"
    )
    assert not said.errors, said.trace
    (page,) = said.html
    assert page.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert "allow-scripts" in page
    assert said.out == "[0] True\n[1] True\n" or said.out == "[1] True\n[0] True\n"
    (shown,) = kernel.run("%%ranks\nif rank == 0:\n    t.show()").html
    assert shown == page
    said = kernel.run("%%ranks\nmodel.bucket_report()")
    (report,) = said.html
    assert "<td>weight, bias</td>" in report or "<td>bias, weight</td>" in report
    (text,) = said.text  # for notebooks of text
    assert text.startswith("[0] schedule ") and "size MiB" in text and "weight" in text
    said = kernel.run("%%ranks\ncomm.explain(1 << 20)")
    (explained,) = said.html
    assert said.text[0].startswith("[0] 1048576 bytes, 2 ranks on 1 host, transport ")
    assert "<th>MB per host</th>" in explained
    assert "all_gather" in explained
    (stepper,) = kernel.run("import dpcore as dp\ndp.schedule('ring', 'all_reduce', 4)").html
    assert "new Stepper" in stepper
    large = kernel.run("dp.schedule('ring', 'all_reduce', 16)")
    assert not large.html
    assert not large.errors


def test_a_rank_that_dies_and_a_restart(kernel):
    before = ranks_of(kernel)
    said = kernel.run("%%ranks\nimport os\nif rank == 1:\n    os._exit(3)\ncomm.barrier()")
    assert "rank 1 has ended with exit code 3" in said.trace
    assert kernel.run("%ranks").out == "no ranks; %%ranks 4 starts four\n"
    assert not kernel.run("%%ranks 2\nkept = rank").errors
    assert kernel.run("%ranks restart").out.startswith("2 ranks, processes ")
    assert "name 'kept' is not defined" in kernel.run("%%ranks\nkept").trace
    linked = kernel.run("%%ranks 1 --link 1gbit --timeout 5\ncomm.world_size")
    assert linked.out == "[0] 1\n"
    assert "ends 2 ranks and their variables" in linked.err
    assert kernel.run("%%ranks --timeout 6\ncomm._link").out == "[0] '1gbit'\n"
    after = ranks_of(kernel)
    assert kernel.run("%ranks stop").out == "no ranks; %%ranks 4 starts four\n"
    for process in (*before, *after):
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_what_is_not_understood(kernel):
    kernel.run("%ranks stop")
    for line, message in (
        ("%%ranks", "how many?"),
        ("%%ranks 0", "'0' is not a number of ranks"),
        ("%%ranks four", "'four' is not a number of ranks"),
        ("%%ranks 2 --colour red", "unrecognized arguments: --colour red"),
        ("%%ranks 2 --get 1x", "names of variables are needed"),
    ):
        said = kernel.run(f"{line}\n1")
        assert message in said.err + said.trace, line
        assert kernel.run("%ranks").out.startswith("no ranks")
    assert "there are no ranks yet" in kernel.run("%ranks restart").err
    assert "%ranks stop" in kernel.run("%ranks help").out


def test_a_killed_kernel_leaves_no_rank(tmp_path):
    kernel = Kernel(tmp_path)
    with kernel.client.setup_kernel():
        kernel.run("%load_ext dpcore")
        kernel.run("%%ranks 2\n1")
        ranks = ranks_of(kernel)
        os.kill(int(kernel.run("import os; print(os.getpid())").out), signal.SIGKILL)
        ends_at = time.monotonic() + 10
        while time.monotonic() < ends_at and any(map(is_running, ranks)):
            time.sleep(0.05)
    assert not any(map(is_running, ranks))
