"""`d2amp demo`: train a detector on real microscopy images, evaluate it, and see what the precision does."""

import argparse
import functools
import json
import os
import shutil
import sys
import time
from pathlib import Path

CONFIG = "nuclei/faster_rcnn_R_50_FPN_narrow.yaml"
PRECISIONS = ("fp32", "bf16", "fp16")
TILES = 8  # few, because a CPU may emulate 16 bit
RESULT = "result.json"


def add_arguments(parser):
    parser.epilog = (
        "Trains a small Faster R-CNN on images of HeLa nuclei (downloaded once, about 50 MB), evaluates it on the other "
        "half of the movie, and evaluates the same weights in fp32, bf16 and fp16 side by side."
    )
    parser.add_argument("--output", default="output/demo", metavar="DIR", help="default: %(default)s")
    parser.add_argument("--precision", default="auto", help="auto, fp32, tf32, fp16 or bf16 (default: %(default)s)")
    parser.add_argument("--config-file", default=CONFIG, metavar="FILE", help="default: %(default)s")
    parser.add_argument("opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="config overrides, after all flags")


def run(args):
    """Returns the exit status."""
    from ..config import load_cfg
    from ..data.register import register_datasets
    from ..launch import choose_device
    from ..preflight import check_output, check_run

    opts = ["OUTPUT_DIR", args.output, "SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION", args.precision, *args.opts]
    cfg = load_cfg(args.config_file, opts)
    check_output(cfg.OUTPUT_DIR)
    _forget_last_demo(Path(cfg.OUTPUT_DIR))
    _set_up_logs(cfg)
    choose_device(cfg)
    register_datasets(cfg)
    check_run(cfg)
    _limit_threads(cfg)
    cfg.freeze()

    trainer, seconds = _train(cfg)
    results = trainer._last_eval_results["bbox"]
    sides = _side_by_side(cfg, trainer.model)
    picture = _draw(cfg, trainer.model)
    result = {
        "AP": results["AP"],
        "AP50": results["AP50"],
        "train_seconds": round(seconds, 1),
        "precision": trainer.policy.precision,
        "precision_reason": trainer.policy.reason,
        "skipped_steps": trainer.last_step.skips,
        "precisions": sides,
        "picture": str(picture),
    }
    with open(Path(cfg.OUTPUT_DIR) / RESULT, "w") as file:
        json.dump(result, file, indent=1)
    _report(cfg, result)
    return 0


def _forget_last_demo(folder):
    """Removes what an earlier demo left, so that plots and logs show one run. Files of other kinds stay."""
    if not (folder / "config.yaml").is_file():
        return
    for pattern in ("events.out.tfevents.*", "metrics.json", "log.txt", "last_checkpoint", "model_*.pth", RESULT, "*.png"):
        for path in folder.glob(pattern):
            path.unlink()
    for name in ("inference", "nonfinite"):
        shutil.rmtree(folder / name, ignore_errors=True)


def _set_up_logs(cfg):
    from detectron2.utils.logger import setup_logger

    os.makedirs(cfg.OUTPUT_DIR, exist_ok=True)
    for name in ("detectron2", "fvcore", "d2amp_ext"):
        setup_logger(cfg.OUTPUT_DIR, name=name)
    with open(os.path.join(cfg.OUTPUT_DIR, "config.yaml"), "w") as file:
        file.write(cfg.dump())


def _limit_threads(cfg):
    import torch

    # On few virtual cores, threads that wait for each other are slower than one alone.
    if cfg.MODEL.DEVICE == "cpu" and (os.cpu_count() or 1) <= 4 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def _train(cfg):
    from detectron2.utils.env import seed_all_rng

    from ..default_trainer import PrecisionTrainer

    seed_all_rng(cfg.SEED if cfg.SEED >= 0 else None)
    trainer = PrecisionTrainer(cfg)
    trainer.resume_or_load(resume=False)
    start = time.perf_counter()
    trainer.train()
    return trainer, time.perf_counter() - start


def _side_by_side(cfg, model):
    """AP of the same weights on the same few tiles in each precision: {name: {"AP", "AP50", "tiles"}}."""
    from detectron2.data import DatasetCatalog, DatasetMapper, build_detection_test_loader
    from detectron2.evaluation import COCOEvaluator, inference_on_dataset

    from ..errors import UserError
    from ..evaluation import in_precision
    from ..policy import PrecisionPolicy

    name = cfg.DATASETS.TEST[0]
    samples = DatasetCatalog.get(name)
    samples = samples[:: max(len(samples) // TILES, 1)][:TILES]
    sides = {}
    for precision in PRECISIONS:
        try:
            in_this = in_precision(model, PrecisionPolicy(precision))
        except UserError as error:
            sides[precision] = {"AP": None, "AP50": None, "tiles": 0, "why": str(error)}
            continue
        evaluator = COCOEvaluator(name, tasks=("bbox",), output_dir=None)
        evaluator.evaluate = functools.partial(evaluator.evaluate, img_ids=[sample["image_id"] for sample in samples])
        loader = build_detection_test_loader(samples, mapper=DatasetMapper(cfg, is_train=False))
        figures = inference_on_dataset(in_this, loader, evaluator)["bbox"]
        sides[precision] = {"AP": figures["AP"], "AP50": figures["AP50"], "tiles": len(samples)}
    return sides


def _draw(cfg, model):
    """Writes a PNG of one test tile with predicted boxes; returns its path."""
    import torch
    from detectron2.data import DatasetCatalog, DatasetMapper, MetadataCatalog
    from detectron2.data.detection_utils import read_image
    from detectron2.evaluation.evaluator import inference_context
    from detectron2.utils.visualizer import Visualizer
    from PIL import Image

    from ..evaluation import in_precision
    from ..policy import PrecisionPolicy

    name = cfg.DATASETS.TEST[0]
    sample = DatasetCatalog.get(name)[0]
    model = in_precision(model, PrecisionPolicy.for_evaluation(cfg))
    with inference_context(model), torch.no_grad():
        instances = model([DatasetMapper(cfg, is_train=False)(sample)])[0]["instances"].to("cpu")
    image = read_image(sample["file_name"], "RGB")
    visualizer = Visualizer(image, MetadataCatalog.get(name), scale=3.0)
    drawn = visualizer.draw_instance_predictions(instances[instances.scores > 0.5]).get_image()
    path = Path(cfg.OUTPUT_DIR) / "predictions.png"
    Image.fromarray(drawn).save(path)
    return path


def _report(cfg, result):
    folder = cfg.OUTPUT_DIR
    print(f"\nTrained {cfg.SOLVER.MAX_ITER} steps in {result['train_seconds']:.0f} s (with evaluation) in "
          f"{result['precision']} ({result['precision_reason']}), {result['skipped_steps']} steps skipped.")  # fmt: skip
    print("\nThe same weights, evaluated in\n\n  precision     AP   AP50   tiles")
    for name, side in result["precisions"].items():
        figures = f"{side['AP']:6.1f} {side['AP50']:6.1f} {side['tiles']:7d}" if side["tiles"] else f"   {side['why']}"
        print(f"  {name:9s} {figures}")
    print(f"\nPredicted boxes:  {result['picture']}")
    print(f"All figures:      {os.path.join(folder, RESULT)}")
    print(f"TensorBoard:      {os.path.join(folder, 'events.out.tfevents.*')}")
    python = os.path.relpath(sys.executable) if sys.executable.startswith(os.getcwd() + os.sep) else sys.executable
    print(f"  look at it:     {python} -m tensorboard.main --logdir {folder}   (then open http://localhost:6006)")
    print(f"\nAP {result['AP']:.1f}   AP50 {result['AP50']:.1f}   on the half of the movie that it never saw")
