"""`d2amp lazy` and tools/lazyconfig_train_net.py: the same run as from YAML, resume, evaluation, mistakes."""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, lazy_sampler
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import LazyConfig, instantiate
from detectron2.engine import SimpleTrainer

from d2amp_ext.cli import main

MICRO = ["--config-file", "quick/faster_rcnn_micro.py"]
CPU = ["train.device=cpu", "train.log_period=1"]


def losses(folder):
    """{iteration: {name: value}} of the losses and the learning rate in metrics.json."""
    lines = [json.loads(line, parse_constant=pytest.fail) for line in (folder / "metrics.json").read_text().splitlines()]
    return {line["iteration"]: {k: v for k, v in line.items() if "loss" in k or k == "lr"} for line in lines if "lr" in line}


def results(folder):
    return (folder / "log.txt").read_text().split("copypaste")[-1]


def test_losses_and_results_are_those_of_the_yaml_road(here):
    yaml = ["SOLVER.MAX_ITER", "6", "MODEL.DEVICE", "cpu", "SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION", "bf16",
            "MONITOR.PERIOD", "1", "TEST.AMP.ENABLED", "True"]  # fmt: skip
    assert main(["train", "--config-file", "quick/faster_rcnn_micro.yaml", *yaml, "OUTPUT_DIR", "yaml"]) == 0
    # The length of the warm-up is a share of max_iter there, as in all LazyConfigs.
    lazy = ["train.max_iter=6", "train.amp.enabled=True", "train.amp.precision=bf16", "train.eval_amp.enabled=True"]
    assert main(["lazy", *MICRO, *CPU, *lazy, *lazy_sampler(), "lr_multiplier.warmup_length=0.8333333333", "train.output_dir=lazy"]) == 0
    shown = losses(here / "yaml")[5]
    assert losses(here / "lazy")[5] == pytest.approx(shown, rel=1e-6) and len(shown) == 6
    log = (here / "lazy" / "log.txt").read_text()
    assert "Precision of training: bf16 on cpu (as configured)" in log and "Precision of evaluation: bf16" in log
    assert results(here / "lazy").split("\n")[0] == results(here / "yaml").split("\n")[0]


def test_stopped_and_resumed_it_ends_with_the_bits_of_a_whole_run(here):
    common = [*MICRO, *CPU, "train.amp.enabled=True", "train.amp.precision=fp32", "train.amp.hold_lr_on_skip=True",
              "train.checkpointer.period=2", "lr_multiplier.warmup_length=0.5"]  # fmt: skip
    assert main(["lazy", *common, "train.max_iter=4", "train.eval_period=2", "train.output_dir=whole"]) == 0
    assert main(["lazy", *common, "train.max_iter=4", "train.eval_period=2", "train.output_dir=parts"]) == 0
    for name in ("model_final.pth", "model_0000003.pth"):
        os.remove(here / "parts" / name)
    (here / "parts" / "last_checkpoint").write_text("model_0000001.pth")
    resumed = ["lazy", "--resume", *common, "train.max_iter=4", "train.eval_period=2", "train.output_dir=parts"]
    assert main(resumed) == 0
    assert "Starting training from iteration 2" in (here / "parts" / "log.txt").read_text()
    whole, parts = (torch.load(here / run / "model_final.pth", weights_only=True) for run in ("whole", "parts"))
    assert all(torch.equal(value, parts["model"][name]) for name, value in whole["model"].items())
    assert whole["trainer"]["hooks"] == parts["trainer"]["hooks"] and whole["iteration"] == parts["iteration"] == 3


def test_stock_detectron2_takes_the_checkpoint_and_its_own_is_resumed(here):
    assert main(["lazy", *MICRO, *CPU, "train.max_iter=1", "train.amp.enabled=True", "train.amp.precision=bf16"]) == 0
    config = LazyConfig.load(str(ROOT / "configs" / MICRO[1]))
    model = instantiate(config.model)
    config.optimizer.params.model = model
    stock = SimpleTrainer(model, [], instantiate(config.optimizer))
    checkpointer = DetectionCheckpointer(model, "output", trainer=stock)
    checkpointer.resume_or_load("", resume=True)
    assert stock.iter == 0
    stock.iter = 1
    checkpointer.save("model_0000001")
    assert main(["lazy", "--resume", *MICRO, *CPU, "train.max_iter=3"]) == 0
    assert "Starting training from iteration 2" in (here / "output" / "log.txt").read_text()


def test_evaluation_alone_gives_the_figures_of_training(here):
    assert main(["lazy", *MICRO, *CPU, "train.max_iter=2"]) == 0
    assert main(["lazy", "--eval-only", *MICRO, *CPU, "train.init_checkpoint=output/model_final.pth",
                 "train.output_dir=eval"]) == 0  # fmt: skip
    assert results(here / "eval") == results(here / "output")
    assert main(["lazy", "--eval-only", "--resume", *MICRO, *CPU]) == 0
    assert results(here / "output") == results(here / "eval")


def test_off_means_stock_bit_for_bit(here):
    """The same parts in Detectron2's own loop."""
    assert main(["lazy", *MICRO, *CPU, "train.max_iter=3", "train.amp.precision=bf16", "train.seed=5"]) == 0
    log = (here / "output" / "log.txt").read_text()
    assert "train.amp.enabled is False: train.amp.precision have no effect" in log
    code = """if True:
        import sys
        from detectron2.config import LazyConfig, instantiate
        from detectron2.engine import SimpleTrainer, hooks, default_setup, default_writers
        from d2amp_ext.data.shapes import register
        register()
        cfg = LazyConfig.apply_overrides(LazyConfig.load(sys.argv[1]), sys.argv[2:])
        default_setup(cfg, None)
        model = instantiate(cfg.model)
        cfg.optimizer.params.model = model
        optimizer = instantiate(cfg.optimizer)
        trainer = SimpleTrainer(model, instantiate(cfg.dataloader.train), optimizer)
        trainer.register_hooks([hooks.LRScheduler(scheduler=instantiate(cfg.lr_multiplier)),
            hooks.PeriodicWriter(default_writers(cfg.train.output_dir, cfg.train.max_iter), period=1)])
        trainer.train(0, cfg.train.max_iter)
    """
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "configs" / MICRO[1]), *CPU, "train.max_iter=3", "train.seed=5",
         "train.output_dir=stock"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert losses(here / "stock") == losses(here / "output") and len(losses(here / "stock")) == 3


def test_accumulation_and_a_schedule_that_has_no_end(here):
    """Found: ConstantParamScheduler has no value for the end, and Detectron2's hook asks for it after the last step."""
    (here / "mine.py").write_text(
        "from detectron2.config import LazyCall as L, LazyConfig\n"
        f"from fvcore.common.param_scheduler import ConstantParamScheduler\n"
        f"base = LazyConfig.load({str(ROOT / 'configs' / MICRO[1])!r})\n"
        "model, dataloader, optimizer, train = base.model, base.dataloader, base.optimizer, base.train\n"
        "lr_multiplier = L(ConstantParamScheduler)(value=1.0)\n"
    )
    opts = ["train.max_iter=2", "train.amp.enabled=True", "train.amp.precision=fp32", "train.accumulate_steps=2"]
    assert main(["lazy", "--config-file", "mine.py", *CPU, *opts]) == 0
    log = (here / "output" / "log.txt").read_text()
    assert "An update sees 4 images: 2 micro-batch(es) of 2 over 1 rank(s)." in log
    assert torch.load(here / "output" / "model_final.pth", weights_only=True)["iteration"] == 1


def test_two_processes(here, run_tool):
    opts = ["train.max_iter=2", "train.amp.enabled=True", "train.amp.precision=fp32", "train.checkpointer.period=1",
            "train.eval_period=1", "--dist-url", "auto"]  # fmt: skip
    flags = ["--num-gpus", "2", *opts[-2:], *MICRO]
    run_tool("tools/lazyconfig_train_net.py", *flags, *CPU, *opts[:-2], cwd=here, check=0)
    final = torch.load(here / "output" / "model_final.pth", weights_only=True)
    assert len(final["resume"]["ranks"]) == 2 and final["trainer"]["iteration"] == 1
    assert losses(here / "output").keys() == {0, 1}


def test_a_retinanet_of_the_zoo_trains_in_bf16(here):
    size = ["dataloader.train.mapper.augmentations.0.short_edge_length=[64]",
            "dataloader.test.mapper.augmentations.0.short_edge_length=64"]  # fmt: skip
    data = ["dataloader.train.dataset.names=d2amp_shapes_train", "dataloader.test.dataset.names=d2amp_shapes_val",
            "dataloader.train.num_workers=0", "dataloader.test.num_workers=0", "dataloader.train.total_batch_size=1"]  # fmt: skip
    opts = ["train.init_checkpoint=", "train.max_iter=1", "train.amp.enabled=True", "train.amp.precision=bf16",
            "model.num_classes=3", "model.head.num_classes=3", "optimizer.lr=0.001"]  # fmt: skip
    command = ["lazy", "--config-file", "COCO-Detection/retinanet_R_50_FPN_1x.py", *CPU, *size, *data]
    assert main([*command, *opts]) == 0
    assert set(losses(here / "output")[0]) >= {"total_loss", "loss_cls", "loss_box_reg"}


@pytest.mark.parametrize(
    "opts, words",
    [
        (["train.amp.enable=True"], ["train.amp.enable", "train.amp.enabled"]),
        (["dataloader.train.dataset.names=nowhere"], ["dataloader.train.dataset.names", "nowhere"]),
        (["model.roi_heads.num_classes=5"], ["model.roi_heads.num_classes", "5", "3"]),
        (["train.init_checkpoint=gone.pth"], ["train.init_checkpoint", "gone.pth"]),
        (["dataloader.train.total_batch_size=0"], ["dataloader.train.total_batch_size", "0"]),
        (["train.max_iter=0"], ["train.max_iter", "0"]),
        (["train.amp.trainer=Nobody", "train.amp.enabled=True"], ["train.amp.trainer", "Nobody", "AMPTrainer"]),
        (["SOLVER.MAX_ITER", "3"], ["train.max_iter=3"]),
        (["optimizer.lrr=1"], ["`optimizer`", "lrr"]),
    ],
)
def test_a_mistake_is_one_clear_error_and_status_2(here, capsys, opts, words):
    assert main(["lazy", *MICRO, *CPU, *opts]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert all(word in line for word in words), line
    assert "SOLVER" not in line.replace("'SOLVER.MAX_ITER'", "") and "DATASETS" not in line.replace("DATASETS.REGISTER", "")


def test_the_tool_is_the_command(run_tool, tmp_path):
    tool = run_tool("tools/lazyconfig_train_net.py", "--help", cwd=tmp_path, check=0).stdout
    assert "train.amp.precision=bf16" in tool and "KEY=VALUE" in tool and "--num-gpus" in tool
