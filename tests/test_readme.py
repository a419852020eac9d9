"""The README and docs/: their commands and examples are run as printed, their tables are compared with the code."""

import ast
import json
import logging
import os
import pickle
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, TinyModel, stock_script, tiny_data
from dataset_checks import forget
from PIL import Image

import d2amp_ext
from d2amp_ext import AMPTrainer, PrecisionPolicy, _compat, amp_step, cli, load_cfg
from d2amp_ext.config import get_key
from d2amp_ext.config_files import find_config, packaged_dir
from d2amp_ext.installer.wheel import SAL_DETECTRON2
from d2amp_ext.keys import DEFAULTS, NOT_YET
from d2amp_ext.precisions import PRECISIONS, SPELLINGS

PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
         for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")))}  # fmt: skip
README, KEYS, DESIGN = PAGES["README.md"], PAGES["docs/keys.md"], PAGES["docs/design.md"]
CLASSES = ("rectangle", "disc", "triangle")


def blocks(text, language):
    """The contents of the fenced blocks of a language."""
    return [content for kind, content in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S) if kind == language]


def commands(block):
    """The commands of a shell block, each a list of words."""
    lines = block.replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


SHELL_BLOCKS = [commands(block) for page in PAGES.values() for block in blocks(page, "bash")]

# Commands that another test runs, or that only hand on to one: how they start -> the file and what is in it.
ELSEWHERE = {
    "make demo": ("tests/test_packaging.py", 'checkout("demo")[1] == ["demo"]'),
    "make test": ("tests/test_packaging.py", 'checkout("test"'),
    "pip install d2amp-ext": ("tests/test_packaging.py", '"pip", "install"'),
    "d2amp setup": ("tests/test_setup_detectron2.py", "setup_detectron2"),
    "d2amp audit": ("tests/test_command_audit.py", '["audit", "--config-file", "quick/faster_rcnn_micro.yaml"'),
    "d2amp train --num-gpus 2": ("tests/test_launch.py", '"--num-gpus", "2"'),
}


# What the commands find in the working directory


def draw_picture(path, number):
    """64 x 48 pixels with a bright rectangle, whose x0, y0, x1, y1 are returned."""
    pixels = np.random.default_rng(number).integers(20, 60, (48, 64, 3), dtype=np.uint8)
    x, y = 4 + 5 * number, 6 + 2 * number
    pixels[y : y + 20, x : x + 24] = 200
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return x, y, x + 24, y + 20


def write_coco(folder):
    for split, numbers in (("train", (0, 1, 2)), ("val", (3, 4, 5))):
        categories = [{"id": number, "name": name} for number, name in enumerate(CLASSES, 1)]
        content = {"images": [], "annotations": [], "categories": categories}
        for number in numbers:
            name = f"{split}_{number}.png"
            x0, y0, x1, y1 = draw_picture(folder / "images" / name, number)
            box = [x0, y0, x1 - x0, y1 - y0]
            content["images"].append({"id": number, "file_name": name, "width": 64, "height": 48})
            content["annotations"].append({"id": number + 1, "image_id": number, "category_id": number % 3 + 1,
                                           "bbox": box, "area": box[2] * box[3], "iscrowd": 0})  # fmt: skip
        (folder / f"{split}.json").write_text(json.dumps(content))


def write_voc(folder):
    for name in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (folder / name).mkdir(parents=True)
    for split, numbers in (("train", (0, 1, 2)), ("val", (3, 4, 5))):
        for number in numbers:
            box = draw_picture(folder / "JPEGImages" / f"{split}_{number}.jpg", number)
            corners = "".join(f"<{tag}>{value}</{tag}>" for tag, value in zip(("xmin", "ymin", "xmax", "ymax"), box))
            (folder / "Annotations" / f"{split}_{number}.xml").write_text(
                "<annotation><size><width>64</width><height>48</height></size><object>"
                f"<name>{CLASSES[number % 3]}</name><pose>Unspecified</pose><truncated>0</truncated>"
                f"<difficult>0</difficult><bndbox>{corners}</bndbox></object></annotation>"
            )
        (folder / "ImageSets" / "Main" / f"{split}.txt").write_text("".join(f"{split}_{n}\n" for n in numbers))


def write_zoo_weights(path):
    """A file like those of Detectron2's model zoo, with one parameter."""
    model = {"backbone.bottom_up.stem.conv1.weight": np.full((16, 3, 7, 7), 0.01, np.float32)}
    path.write_bytes(pickle.dumps({"model": model, "__author__": "test"}))


@pytest.fixture
def here(tmp_path, monkeypatch, datasets_dir, fresh_loggers):
    """A working directory with what the pages take for granted, and nothing else."""
    write_coco(tmp_path)
    write_voc(tmp_path / "VOC")
    write_zoo_weights(tmp_path / "weights.pkl")
    draw_picture(tmp_path / "photo.jpg", 0)
    (tmp_path / "cfg.yaml").write_text(
        '_BASE_: "quick/faster_rcnn_micro.yaml"\nMODEL:\n  DEVICE: "cpu"\nSOLVER:\n  MAX_ITER: 2\n'
    )
    script = stock_script("train_net.py") or ROOT / "tests" / "repositories" / "default.py"
    (tmp_path / "their_repo").mkdir()
    shutil.copy(script, tmp_path / "their_repo" / "train_net.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DETECTRON2_DATASETS", str(datasets_dir))
    yield tmp_path
    forget("mine_train", "mine_val")


# Shell blocks

QUICK = ["MODEL.DEVICE", "cpu", "SOLVER.STEPS", "()", "SOLVER.WARMUP_ITERS", "0", "DATALOADER.NUM_WORKERS", "0",
         "INPUT.MIN_SIZE_TRAIN", "(48,)", "INPUT.MIN_SIZE_TEST", "48",
         "MODEL.ROI_HEADS.SCORE_THRESH_TEST", "0.0"]  # fmt: skip
NARROW = ["MODEL.RESNETS.STEM_OUT_CHANNELS", "16", "MODEL.RESNETS.WIDTH_PER_GROUP", "8",
          "MODEL.RESNETS.RES2_OUT_CHANNELS", "16", "MODEL.FPN.OUT_CHANNELS", "16", "MODEL.ROI_BOX_HEAD.FC_DIM", "32",
          # without real weights, frozen statistics let the activations explode
          "MODEL.RESNETS.NORM", "BN", "MODEL.FPN.NORM", "BN", "MODEL.BACKBONE.FREEZE_AT", "0"]  # fmt: skip


def cut(words):
    """A command with settings added that make it quick, and a local file in place of a download."""
    words = ["weights.pkl" if word.startswith("detectron2://") else word for word in words]
    if "predict" in words:
        return words
    if "lazy" in words:
        return [*words, "train.device=cpu", "train.max_iter=2"]
    zoo = NARROW if "weights.pkl" in words else []
    return [*words, *QUICK, *zoo, "SOLVER.MAX_ITER", "3" if "--resume" in words else "2"]


def output_of(words):
    return Path(words[words.index("OUTPUT_DIR") + 1] if "OUTPUT_DIR" in words else "output")


def check_train(words):
    folder = output_of(words)
    log = (folder / "log.txt").read_text()
    assert re.search(r"copypaste: AP,AP50,AP75.*\n.*copypaste: \d+\.\d+,", log)
    if "--eval-only" in words:
        assert "Starting training" not in log.split("Command line arguments")[-1]
        return
    last = 3 if "--resume" in words else 2
    metrics = (folder / "metrics.json").read_text().splitlines()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in metrics]
    assert any(line["iteration"] == last - 1 and "total_loss" in line for line in lines)
    assert torch.load(folder / "model_final.pth", weights_only=True)["iteration"] == last - 1
    assert "Precision of training: " in log
    if "--resume" in words:
        assert "Starting training from iteration 2" in log


def check_predict(words):
    output = Path(words[words.index("--output") + 1])
    assert isinstance(json.loads((output / "predictions.json").read_text()), list)
    assert {path.name for path in output.glob("*.png")} == {path.name for path in Path("images").iterdir()}


def covered_elsewhere(words):
    for start, (file, text) in ELSEWHERE.items():
        if words[: len(start.split())] == start.split():
            assert text in (ROOT / file).read_text(), f"{file} does not test `{start}` any more"
            return True
    return False


def run_make(target, folder):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    options = [f"VENV={folder / 'venv'}", "-n", "-C", str(ROOT)]
    # without the settings of the make that may be running the tests
    environment = {name: value for name, value in os.environ.items() if not re.match("MAKE|MFLAGS$", name)}
    done = subprocess.run(["make", *options, target], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("block", SHELL_BLOCKS, ids=lambda block: " ".join(block[0])[:60].rstrip())
def test_a_shell_block_does_what_it_says(block, here, run_tool):
    in_own_process = any("predict" in words for words in block)  # the first block that people will try
    for words in block:
        if words[0] == "make":
            printed = run_make(words[1], here)
            if words[1] == "bench":
                run_bench(printed, here)
                continue
        if covered_elsewhere(words):
            continue
        words = cut(words)
        if words[0] == "torchrun":
            # One process: two, and their agreement with Detectron2's launcher, are test_launch's.
            options = ["--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
            assert words[1:3] == ["--nproc-per-node", "2"]
            run_tool("torch.distributed.run", *options, *words[3:], cwd=here, check=0)
        else:
            assert words[0] == "d2amp", f"`{shlex.join(words)}` is neither run nor covered"
            if in_own_process or words[1] in ("run", "lightning"):
                run_tool("d2amp_ext.cli", *words[1:], cwd=here, check=0)
            else:
                assert cli.main(words[1:]) == 0
        (check_predict if "predict" in words else check_train)(words)


def run_bench(printed, folder):
    """The script that `make bench` would run, with fewer steps."""
    script = ROOT / "benchmarks" / "step_overhead.py"
    assert "benchmarks/step_overhead.py" in printed
    output = folder / "results.json"
    argv, sys.argv = sys.argv, [str(script), "--steps", "20", "--config-file", "cfg.yaml", "--output", str(output)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = argv
        logging.disable(logging.NOTSET)
    assert json.loads(output.read_text())["steps"] == 20


def test_every_covered_command_is_still_on_a_page():
    printed = [" ".join(words) for block in SHELL_BLOCKS for words in block]
    for start in ELSEWHERE:
        assert any(line.startswith(start) for line in printed), start


# Python and YAML blocks


def check_mixin(names, out):
    assert names["trainer"].policy.precision == "bf16" and names["trainer"].last_step.iteration == 1
    assert type(names["trainer"]._trainer) is AMPTrainer and "bf16 on cpu" in out
    assert Path("output/model_final.pth").is_file()


def check_amp_trainer(names, out):
    trainer = names["trainer"]
    assert trainer.policy.precision == "fp16" and trainer.accumulate_steps == 2 and trainer.last_step.iteration == 9
    assert trainer.last_step.skips == 1 and "\nFalse tensor(" in out  # the spoilt batch is one of the 20


def check_loop(names, out):
    assert names["record"].iteration == 9 and names["record"].skips == 1
    assert len(re.findall(r"^\d False \{", out, re.M)) == 9 and "\n3 True {" in out
    model = TinyModel()
    reference = AMPTrainer(model, tiny_data(spoil={3}), torch.optim.SGD(model.parameters(), lr=0.1))
    reference.train(0, 10)
    state = names["model"].state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def check_predictor(names, out):
    precision, count = names["predictor"].policy.precision, len(names["instances"])
    assert precision in PRECISIONS[1:] and out.endswith(f"{precision} {count}\n")


def check_lightning(names, out):
    assert "bf16-mixed 1" in out  # one of the ten batches is spoilt
    assert names["trainer"].global_step == 10


PYTHON_CHECKS = {"PrecisionTrainerMixin": check_mixin, "AMPTrainer": check_amp_trainer, "amp_step": check_loop,
                 "PolicyPrecision": check_lightning, "Predictor": check_predictor}  # fmt: skip


def lightning_module():
    """TinyModel as a LightningModule."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = TinyModel()

        def training_step(self, batch, batch_idx):
            return sum(self.model(batch).values())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


def test_python_blocks_run_as_printed(here, capsys):
    printed = blocks(README, "python")
    assert len(printed) == len(PYTHON_CHECKS)
    for number, (source, (name, check)) in enumerate(zip(printed, PYTHON_CHECKS.items())):
        assert name in source.splitlines()[0]
        model = TinyModel()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        names = {"model": model, "optimizer": optimizer, "data_loader": tiny_data(spoil={3}),
                 "lightning_module": lightning_module()}  # fmt: skip
        if name == "PolicyPrecision":  # Lightning takes a list for several loaders
            names["data_loader"] = torch.utils.data.DataLoader(names["data_loader"], batch_size=None)
        capsys.readouterr()
        exec(compile(source, f"README.md, Python block {number + 1}", "exec"), names)
        check(names, capsys.readouterr().out)


def test_the_loop_recipe_is_short():
    (recipe,) = (block for block in blocks(README, "python") if "amp_step(" in block)
    assert len([line for line in recipe.splitlines() if line.strip()]) < 25


def test_yaml_blocks_are_configs(here):
    printed = [block for page in PAGES.values() for block in blocks(page, "yaml")]
    assert printed
    for block in printed:
        Path("printed.yaml").write_text(block)
        cfg, content = load_cfg("printed.yaml"), yaml.safe_load(block)
        if content.pop("_BASE_", None):
            assert cfg.MODEL.MASK_ON and cfg.SOLVER.AMP.PRECISION == "bf16"
        for key, value in flat(content):
            found = get_key(cfg, key)
            assert (list(found) if isinstance(found, tuple) else found) == value


def flat(node, path=()):
    for name, value in node.items():
        yield from flat(value, (*path, name)) if isinstance(value, dict) else [(".".join((*path, name)), value)]


def test_the_line_of_a_skip_is_the_one_that_is_logged(caplog):
    (shown,) = blocks(README, "")
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = PrecisionPolicy("fp16").resolve("cpu")
    spoil = lambda: model.second.weight.grad.fill_(float("inf"))  # noqa: E731
    amp_step(model(tiny_data(1)[0]), optimizer, policy=policy, scaler=policy.make_scaler(), after_backward=spoil)
    (logged,) = [record.getMessage() for record in caplog.records if record.name == "d2amp_ext.guard"]
    assert re.sub(r"\d+", "N", logged) == re.sub(r"\d+", "N", shown.strip())


# How the README begins


def test_one_paragraph_then_the_two_commands():
    before = README.split("```bash")[0].strip().split("\n\n")
    assert before[0] == "# d2amp-ext" and len(before) == 2
    assert SHELL_BLOCKS[0] == [["make", "demo"], ["make", "test"]]


# Tables


def rows(text, *header):
    """The cells of the rows of every table with these first column titles."""
    found, inside = [], False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line[1:].rstrip().rstrip("|").split("|")] if line.startswith("|") else []
        if not cells:
            inside = False
        elif tuple(cells[: len(header)]) == header:
            inside = True
        elif inside and not line.startswith("|---"):
            found.append(cells)
    assert found, f"no table {header}"
    return found


def code(cell):
    """What stands between backticks in a cell."""
    return re.findall(r"`([^`]*)`", cell)


def test_docs_keys_is_the_table_of_defaults():
    table = {}
    for key, default, _, since in rows(KEYS, "key", "default", "meaning", "since"):
        ((key,), (default,)) = code(key), code(default)
        assert key not in table and f"## [{since}]" in PAGES["CHANGELOG.md"]
        table[key] = ast.literal_eval(default)
    assert table == DEFAULTS
    assert {key: type(value) for key, value in table.items()} == {key: type(value) for key, value in DEFAULTS.items()}


@pytest.mark.parametrize("page, title", [("README.md", "accepted today"), ("docs/keys.md", "accepted in this version")])
def test_what_is_not_supported_yet(page, title):
    accepted = {}
    for key, values in rows(PAGES[page], "key", title):
        accepted[code(key)[0]] = {ast.literal_eval(value) for value in code(values)}
    assert accepted == {key: {tuple(v) if v == [] else v for v in values} for key, values in NOT_YET.items()}
    marked = {code(row[0])[0] for row in rows(KEYS, "key", "default") if "#not-supported-yet" in row[2]}
    assert marked == set(NOT_YET)


def test_the_readmes_keys_have_these_defaults():
    cfg = load_cfg()
    for key, default, _ in rows(README, "key", "default", "meaning"):
        assert get_key(cfg, code(key)[0]) == ast.literal_eval(code(default)[0])


def test_every_key_on_a_page_exists():
    cfg = load_cfg()
    sections = "|".join(name for name, value in cfg.items() if hasattr(value, "keys"))
    for page, text in PAGES.items():
        for key in re.findall(rf"`((?:{sections})(?:\.[A-Z0-9_]+)+)", text):
            try:
                get_key(cfg, key)
            except KeyError:
                pytest.fail(f"{page} names {key}, which does not exist")


def test_spellings():
    ours = {name: {other for other, meant in SPELLINGS.items() if meant == name != other} for name in PRECISIONS}
    assert {code(name)[0]: set(code(others)) for name, others in rows(KEYS, "precision", "also written")} == ours
    readme = {code(name)[0]: set(code(others)) for others, name in rows(README, "spelling", "means")}
    assert readme == {name: spellings for name, spellings in ours.items() if spellings}
    named = [code(row[0])[0] for row in rows(README, "`SOLVER.AMP.PRECISION`", "what it is")]
    assert sorted(named) == sorted(PRECISIONS)


def test_the_public_names():
    names = {re.match(r"\w+", code(row[0])[0])[0] for row in rows(DESIGN, "name", "what it is")}
    assert names == set(d2amp_ext.__all__)


def test_the_house():
    package = ROOT / "d2amp_ext"
    modules = {path.relative_to(package).as_posix() for path in package.rglob("*.py")}
    assert {code(row[0])[0] for row in rows(DESIGN, "module", "what it is")} == modules


def test_packaged_configs_that_are_named_exist():
    folders = "|".join(path.name for path in packaged_dir().iterdir() if path.is_dir())
    named = {name for page in PAGES.values() for name in re.findall(rf"\b(?:{folders})/[\w/.-]+\.yaml", page)}
    assert named and all(find_config(name) for name in named)


# Versions and links


def test_versions():
    versions = re.findall(r"^## \[([\d.]+)\] - \d{4}-\d\d-\d\d$", PAGES["CHANGELOG.md"], re.M)
    assert versions[0] == d2amp_ext.__version__
    (torch_row,) = (row for row in rows(README, "", "supported") if row[0] == "torch")
    assert ".".join(map(str, _compat.MIN_TORCH)) in torch_row[1]
    name, version = SAL_DETECTRON2.requirement.split("==")
    assert f"`{name}` {version}" in README
    assert 'python_requires=">=3.10"' in (ROOT / "setup.py").read_text() and "| 3.10 and newer |" in README


def slugs(text):
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        assert not anchor or anchor in slugs(file.read_text(encoding="utf-8")), target
