"""`d2amp run`: Detectron2's own scripts, which nobody here wrote, and small ones for what a script may do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import conftest
import pytest
import torch
from conftest import ROOT
from detectron2.config import get_cfg

from d2amp_ext import cli
from d2amp_ext.patches import table

REPOSITORIES = ROOT / "tests" / "repositories"
YAML = ROOT / "configs" / "quick" / "faster_rcnn_micro.yaml"
LAZY = ROOT / "configs" / "quick" / "faster_rcnn_micro.py"
ON = ["SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION"]
LAZY_ON = ["train.amp.enabled=True", "train.amp.precision="]


def stock_script(name):
    found = conftest.stock_script(name)
    if found is None:
        pytest.skip(f"tools/{name} is not there: neither a checkout of Detectron2 nor a distribution that has its tools")
    return found


@pytest.fixture(autouse=True)
def _alone(datasets_dir, monkeypatch, fresh_loggers):
    """A script may leave modules of its own behind; and it must leave nothing else."""
    monkeypatch.setenv("DETECTRON2_DATASETS", str(datasets_dir))
    modules, before = set(sys.modules), (list(sys.argv), list(sys.path), sys.modules["__main__"])
    yield
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before and not table.is_installed()
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith((str(REPOSITORIES), "/tmp")):
            del sys.modules[name]


def d2amp(*argv):
    try:
        return cli.main([str(argument) for argument in argv])
    except SystemExit as error:
        return error.code


def weights(folder):
    return torch.load(folder / "model_final.pth", weights_only=True)["model"]


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    return [line["total_loss"] for line in lines if "total_loss" in line]


def identical(folder, other):
    ours, theirs = weights(folder), weights(other)
    assert ours.keys() == theirs.keys() and len(ours) > 10
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def go_back(folder):
    """Makes it look as if a run had ended after its second update; the folder where its result is now."""
    (folder / "whole").mkdir()
    (folder / "model_final.pth").rename(folder / "whole" / "model_final.pth")
    for path in folder.glob("model_*3.pth"):
        path.unlink()
    (folder / "last_checkpoint").write_text("model_0000001.pth")
    return folder / "whole"


def yaml_run(folder, *opts, steps=4):
    return ["--config-file", YAML, "MODEL.DEVICE", "cpu", "OUTPUT_DIR", folder, "SOLVER.MAX_ITER", steps,
            "DATASETS.TEST", "()", *opts]  # fmt: skip


def lazy_run(folder, *overrides, steps=4):
    return ["--config-file", LAZY, "train.device=cpu", f"train.output_dir={folder}", f"train.max_iter={steps}",
            "train.log_period=1", *overrides]  # fmt: skip


# Detectron2's scripts


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_train_net_gives_what_d2amp_train_gives(precision, tmp_path):
    assert d2amp("run", stock_script("train_net.py"), *yaml_run(tmp_path / "run", *ON, precision)) == 0
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count(f"Precision of training: {precision} on cpu") == 1
    assert d2amp("train", *yaml_run(tmp_path / "train", *ON, precision, "DATASETS.TEST", "('d2amp_shapes_val',)")) == 0
    assert identical(tmp_path / "run", tmp_path / "train")
    assert losses(tmp_path / "run") == losses(tmp_path / "train") != []


def test_train_net_with_amp_off_gives_what_python_gives(tmp_path, run_tool):
    script = stock_script("train_net.py")
    assert d2amp("run", script, *yaml_run(tmp_path / "run")) == 0
    # The sample data are what only d2amp_ext knows; registering them is no change of a run.
    code = "import sys, runpy; from d2amp_ext.data.register import register_named; register_named('d2amp_shapes_train'); " \
           "sys.argv[0] = sys.argv.pop(1); runpy.run_path(sys.argv[0], run_name='__main__')"  # fmt: skip
    (tmp_path / "stock.py").write_text(code)
    done = subprocess.run([sys.executable, tmp_path / "stock.py", script, *map(str, yaml_run(tmp_path / "stock"))],
                          cwd=tmp_path, capture_output=True, text=True, timeout=200,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])})  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert (
        identical(tmp_path / "run", tmp_path / "stock") and losses(tmp_path / "run") == losses(tmp_path / "stock") != []
    )


def test_train_net_resumes_exactly(tmp_path):
    script = stock_script("train_net.py")
    arguments = yaml_run(tmp_path, *ON, "bf16", "SOLVER.CHECKPOINT_PERIOD", 2)
    assert d2amp("run", script, *arguments) == 0
    whole = go_back(tmp_path)
    assert d2amp("run", script, "--resume", *arguments) == 0
    assert "Starting training from iteration 2" in (tmp_path / "log.txt").read_text()
    assert identical(whole, tmp_path)


def test_train_net_evaluates_in_the_precision_of_evaluation(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    evaluation = ["DATASETS.TEST", "('d2amp_shapes_val',)", "TEST.AMP.ENABLED", "True", "TEST.AMP.PRECISION", "bf16"]
    assert d2amp("run", stock_script("train_net.py"), "--eval-only", *yaml_run(tmp_path / "out", *evaluation)) == 0
    log = (tmp_path / "out" / "log.txt").read_text()
    assert "Precision of evaluation: bf16" in log and "Evaluation results for d2amp_shapes_val" in log


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_plain_train_net_runs_under_the_policy(precision, tmp_path):
    script = stock_script("plain_train_net.py")
    assert d2amp("run", script, *yaml_run(tmp_path / "plain", *ON, precision)) == 0
    assert d2amp("run", stock_script("train_net.py"), *yaml_run(tmp_path / "train", *ON, precision)) == 0
    assert identical(tmp_path / "plain", tmp_path / "train")
    assert f"in a loop of its own: its forward pass runs in {precision}" in (tmp_path / "plain" / "log.txt").read_text()


def test_plain_train_net_is_refused_in_fp16(tmp_path, capsys):
    assert d2amp("run", stock_script("plain_train_net.py"), *yaml_run(tmp_path / "out", *ON, "fp16")) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert (
        said[-1].startswith("error: SOLVER.AMP.PRECISION = 'fp16' needs gradients that are scaled")
        and "bf16" in said[-1]
    )
    assert not any("Traceback" in line for line in said) and not list((tmp_path / "out").glob("*.pth"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_lazyconfig_train_net_gives_what_d2amp_lazy_gives(precision, tmp_path):
    on = [LAZY_ON[0], LAZY_ON[1] + precision]
    script = stock_script("lazyconfig_train_net.py")
    assert d2amp("run", script, *lazy_run(tmp_path / "run", *on)) == 0
    assert d2amp("lazy", *lazy_run(tmp_path / "lazy", *on)) == 0
    assert (
        identical(tmp_path / "run", tmp_path / "lazy") and losses(tmp_path / "run") == losses(tmp_path / "lazy") != []
    )
    assert f"Precision of training: {precision} on cpu" in (tmp_path / "run" / "log.txt").read_text()


def test_lazyconfig_train_net_resumes_exactly(tmp_path):
    on = [LAZY_ON[0], LAZY_ON[1] + "bf16", "train.checkpointer.period=2"]
    script = stock_script("lazyconfig_train_net.py")
    assert d2amp("run", script, *lazy_run(tmp_path, *on)) == 0
    whole = go_back(tmp_path)
    assert d2amp("run", script, "--resume", *lazy_run(tmp_path, *on)) == 0
    assert "Starting training from iteration 2" in (tmp_path / "log.txt").read_text()
    assert identical(whole, tmp_path)


def test_a_misspelt_name_of_a_lazy_config_is_refused(tmp_path, capsys):
    arguments = lazy_run(tmp_path / "out", "train.amp.enable=True")
    assert d2amp("run", stock_script("lazyconfig_train_net.py"), *arguments) == 2
    assert "Did you mean train.amp.enabled" in capsys.readouterr().err and not list((tmp_path / "out").glob("*.pth"))


# Several processes


def found(folder, rank):
    return json.loads((folder / f"rank{rank}.json").read_text())


def test_processes_that_the_script_launches(tmp_path, run_tool):
    script, folder = REPOSITORIES / "launched.py", tmp_path / "out"
    run_tool(
        "d2amp_ext.cli", "run", script, "--num-processes", 2, "--folder", folder, *ON, "bf16", cwd=tmp_path, check=0
    )
    for rank in (0, 1):
        assert found(folder, rank) == {"trainer": "detectron2.engine.train_loop.AMPTrainer", "dtype": "torch.bfloat16",
                                       "policy": "bf16", "world": 2}  # fmt: skip


def test_a_mistake_in_a_process_that_the_script_launches_is_one_line(tmp_path, capsys):
    """torch passes on the text of the error only; this is how it looks."""
    text = "from torch.multiprocessing import ProcessRaisedException\nraise ProcessRaisedException(" \
           "'''\n-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n  File \"x\", line 1\n" \
           "d2amp_ext.errors.{}: It is wrong.\n''', 1, 5)"  # fmt: skip
    assert d2amp("run", script(tmp_path, text.format("UnknownKeyError"))) == 2
    assert capsys.readouterr().err.strip() == "error: It is wrong."
    assert d2amp("run", script(tmp_path, text.format("NoSuchError"))) == 1
    assert "ProcessRaisedException" in capsys.readouterr().err


def test_under_torchrun(tmp_path, run_tool):
    script, folder = REPOSITORIES / "launched.py", tmp_path / "out"
    run_tool("torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "d2amp_ext.cli", "run", script, "--folder",
             folder, *ON, "bf16", cwd=tmp_path, check=0)  # fmt: skip
    assert [found(folder, rank)["world"] for rank in (0, 1)] == [2, 2] and found(folder, 1)["policy"] == "bf16"


def test_one_process_off(tmp_path):
    assert d2amp("run", REPOSITORIES / "launched.py", "--folder", tmp_path) == 0
    assert found(tmp_path, 0) == {"trainer": "detectron2.engine.train_loop.SimpleTrainer", "dtype": "torch.float32",
                                  "policy": "off", "world": 1}  # fmt: skip


# What a script may do


def script(folder, text, name="script.py"):
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("import detectron2\n" + text)
    return path


def test_a_script_runs_as_python_would_run_it(tmp_path, capsys):
    script(tmp_path / "project", "VALUE = 5\n", "beside.py")
    text = "import sys, beside, json\nfrom detectron2.config import get_cfg\n" \
           "print(json.dumps([sys.argv, sys.path[0], __name__, __file__, beside.VALUE, 'PRECISION' in get_cfg().SOLVER.AMP,\n" \
           "      sys.modules['__main__'].__file__]))"  # fmt: skip
    path = script(tmp_path / "project", text)
    assert d2amp("run", path, "--flag", "-x", "1", "--", "--debug") == 0
    said = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("[["))
    argv, first, name, file, value, keys, main_file = json.loads(said)
    assert argv[0] == str(path) and argv[1:3] == ["--flag", "-x"] and argv[-1] == "--debug"
    assert (
        first == str(tmp_path / "project")
        and name == "__main__"
        and file == main_file == str(path)
        and value == 5
        and keys
    )
    assert "PRECISION" not in get_cfg().SOLVER.AMP


def test_a_module_and_a_folder(tmp_path, monkeypatch, capsys):
    script(tmp_path / "package", "", "__init__.py")
    text = "import sys\nprint('ran', __name__, __package__, sys.argv[1:], sys.path[0])"
    script(tmp_path / "package", text, "__main__.py")
    monkeypatch.chdir(tmp_path)
    assert d2amp("run", "-m", "package", "a", "-b") == 0
    assert f"ran __main__ package ['a', '-b'] {tmp_path}" in capsys.readouterr().out
    assert d2amp("run", "package", "a") == 0
    assert "ran __main__  ['a'] package" in capsys.readouterr().out  # as it was given, as Python does


@pytest.mark.parametrize("text, status", [("import sys; sys.exit(7)", 7), ("import sys; sys.exit()", None), ("pass", 0),
                                          ("raise SystemExit('told so')", "told so")])  # fmt: skip
def test_the_exit_status_is_the_script_s_own(text, status, tmp_path):
    assert d2amp("run", script(tmp_path, text)) == status


def test_an_exception_has_the_script_s_own_traceback(tmp_path, capsys):
    path = script(tmp_path, "def f():\n    raise RuntimeError('broken')\n\nf()\n")
    assert d2amp("run", path) == 1
    lines = capsys.readouterr().err.splitlines()
    start = lines.index("Traceback (most recent call last):")
    assert lines[start + 1] == f'  File "{path}", line 5, in <module>' and lines[-1] == "RuntimeError: broken"


def test_a_module_that_the_script_misses_is_its_own_affair(tmp_path, capsys):
    assert d2amp("run", script(tmp_path, "import no_such_module")) == 1
    assert "ModuleNotFoundError: No module named 'no_such_module'" in capsys.readouterr().err


def test_ctrl_c(tmp_path, capsys):
    assert d2amp("run", script(tmp_path, "raise KeyboardInterrupt")) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_mistake_of_the_user_is_one_line(tmp_path, capsys):
    text = "from detectron2.config import get_cfg\nget_cfg().merge_from_list(['SOLVER.AMP.PRECISON', 'bf16'])"
    assert d2amp("run", script(tmp_path, text)) == 2
    assert (
        capsys.readouterr()
        .err.strip()
        .splitlines()[-1]
        .startswith("error: Unknown config key SOLVER.AMP.PRECISON. Did you mean")
    )
    assert d2amp("run", "--debug", script(tmp_path, text)) == 2
    assert "Traceback" in capsys.readouterr().err


def test_trust_is_passed_on(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("MODEL:\n  WEIGHTS: !!python/object/apply:os.getcwd []\n")
    path = script(
        tmp_path, f"from detectron2.config import get_cfg\nget_cfg().merge_from_file({str(tmp_path / 'c.yaml')!r})"
    )
    assert d2amp("run", path) == 2 and "pass --trust" in capsys.readouterr().err
    assert d2amp("run", "--trust", path) == 0


@pytest.mark.parametrize("text, said", [
    (None, "does not exist"),
    ("def f(:\n", "is not Python, line 1"),
    ("import torch, os\nprint(1)\n", "imports no Detectron2"),
    ("\0", "is not Python"),
])  # fmt: skip
def test_what_is_no_script_for_it_is_told_so(text, said, tmp_path, capsys):
    path = tmp_path / "script.py"
    if text is not None:
        path.write_text(text)
    assert d2amp("run", path, "--flag") == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and said in error and str(path) in error and len(error.splitlines()) == 1


def test_other_names_that_are_no_script(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert d2amp("run", tmp_path) == 2 and "has no __main__.py" in capsys.readouterr().err
    assert d2amp("run", "detectron2.engine") == 2 and "A module is run with -m" in capsys.readouterr().err
    assert d2amp("run", "-m", "no_such_package.train") == 2
    assert "There is no module 'no_such_package.train'" in capsys.readouterr().err
    assert d2amp("run") == 2 and "SCRIPT" in capsys.readouterr().err


def test_imports_are_followed_to_the_files_beside(tmp_path):
    (tmp_path / "helper.py").write_text("import os\nimport more\n")
    (tmp_path / "more.py").write_text("import helper\nfrom detectron2.config import get_cfg\nget_cfg()\n")
    (tmp_path / "script.py").write_text("import helper\n")
    assert d2amp("run", tmp_path / "script.py") == 0


def test_a_script_that_uses_nothing_of_detectron2_is_told_so(tmp_path, capfd):
    assert d2amp("run", script(tmp_path, "print('done')")) == 0
    assert "d2amp run changed nothing in it" in "".join(capfd.readouterr())
