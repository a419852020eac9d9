#!/usr/bin/env python
"""Which architectures of Detectron2's zoo train and evaluate in 16 bit: with this package, and under plain autocast.

Every config of the zoo, YAML and LazyConfig, is shrunk in width and image size, not in structure; those that come out
the same are run once. Each makes two training steps and one evaluation on the CPU, in fp32, bf16 and fp16. Proposals,
matches and samples of the steps are those of the fp32 run: else the losses would be those of other boxes. Writes a JSON
file and the table docs/zoo_matrix.md.

    OMP_NUM_THREADS=1 python benchmarks/zoo_matrix.py [--only mask_rcnn]
"""

import argparse
import copy
import json
import logging
import platform
import sys
import time
import warnings
from pathlib import Path

import torch
from detectron2.config import LazyCall, LazyConfig, get_cfg, instantiate
from detectron2.layers import FrozenBatchNorm2d
from detectron2.modeling import build_model
from detectron2.modeling.backbone import ResNet
from detectron2.structures import BitMasks, Boxes, Instances, Keypoints, PolygonMasks
from detectron2.utils.env import seed_all_rng
from detectron2.utils.events import EventStorage
from omegaconf import OmegaConf

from d2amp_ext import AMPTrainer, PrecisionPolicy, ScalerOptions
from d2amp_ext.audit.choices import Choices
from d2amp_ext.config_files import read_yaml, zoo_dir
from d2amp_ext.doctor.machine import cpu_model
from d2amp_ext.evaluation import evaluating
from d2amp_ext.numerics.island import tensors_in

SIZE = (64, 64)  # pixels; Detectron2 pads to multiples of 32
TOLERANCE = {"bf16": 0.05, "fp16": 0.05}  # of the sum of the first losses, relative to fp32
HERE = Path(__file__).resolve().parent


# Configs


def yaml_model(path):
    """(signature, function that builds the shrunk model, description of the inputs) of a YAML config."""
    cfg = get_cfg()
    cfg.merge_from_other_cfg(type(cfg)(read_yaml(str(path))))
    cfg.MODEL.DEVICE, cfg.MODEL.WEIGHTS = "cpu", ""
    resnets = cfg.MODEL.RESNETS
    heads = (cfg.MODEL.ROI_BOX_HEAD, cfg.MODEL.ROI_MASK_HEAD, cfg.MODEL.FPN)
    width = 32 if "GN" in (resnets.NORM, *(head.NORM for head in heads)) else 16  # GN has 32 groups
    resnets.STEM_OUT_CHANNELS, resnets.RES2_OUT_CHANNELS = width, 2 * width
    resnets.WIDTH_PER_GROUP = max(1, width // resnets.NUM_GROUPS)
    cfg.MODEL.FPN.OUT_CHANNELS = width
    cfg.MODEL.SEM_SEG_HEAD.CONVS_DIM = 32  # Detectron2 gives it GN when nothing is said
    for head in (cfg.MODEL.ROI_BOX_HEAD, cfg.MODEL.ROI_MASK_HEAD):
        head.CONV_DIM = width
    cfg.MODEL.ROI_BOX_HEAD.FC_DIM = 64
    cfg.MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS = [width] * 2
    cfg.MODEL.RPN.PRE_NMS_TOPK_TRAIN = cfg.MODEL.RPN.PRE_NMS_TOPK_TEST = 100
    cfg.MODEL.RPN.POST_NMS_TOPK_TRAIN = cfg.MODEL.RPN.POST_NMS_TOPK_TEST = 10
    cfg.MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE = 8
    cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = cfg.MODEL.RETINANET.SCORE_THRESH_TEST = 0.0
    cfg.TEST.DETECTIONS_PER_IMAGE = 20
    inputs = {
        "classes": cfg.MODEL.RETINANET.NUM_CLASSES if "Retina" in cfg.MODEL.META_ARCHITECTURE else cfg.MODEL.ROI_HEADS.NUM_CLASSES,
        "keypoints": cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS if cfg.MODEL.KEYPOINT_ON else 0,
        "bitmask": cfg.INPUT.MASK_FORMAT == "bitmask",
        "proposals": cfg.MODEL.PROPOSAL_GENERATOR.NAME == "PrecomputedProposals",
        "stuff": cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES,
    }
    return cfg.MODEL.dump(), lambda: build_model(cfg), inputs


def lazy_model(path):
    """The same of a LazyConfig."""
    config = LazyConfig.load(str(path))
    model = config.model
    bottom_up = model.backbone.get("bottom_up", None)
    stages = bottom_up.get("stages", None) if bottom_up is not None else None
    if stages is not None and "make_default_stages" in str(stages.get("_target_", "")):
        bottom_up.stages = narrow_stages(stages.depth, stages.get("norm", "BN"), stages.get("stride_in_1x1", False))
        bottom_up.stem.out_channels = 16
        if model.backbone.top_block.get("in_channels") == 2048:
            model.backbone.top_block.in_channels = 256
    heads = model.get("roi_heads", {})
    if heads:
        heads.batch_size_per_image = 8
        model.proposal_generator.post_nms_topk = (10, 10)
    keypoints = heads.get("keypoint_head", {}).get("num_keypoints", 0) if heads else 0
    inputs = {
        "classes": heads.get("num_classes", 0) if heads else model.get("num_classes", 80),
        "keypoints": keypoints,
        "bitmask": config.dataloader.train.mapper.get("instance_mask_format", "polygon") == "bitmask",
        "proposals": False,
        "stuff": model.get("sem_seg_head", {}).get("num_classes", 54),
    }
    return str(OmegaConf.to_container(model, resolve=False)), lambda: instantiate(model), inputs


def narrow_stages(depth, norm, stride_in_1x1):
    from detectron2.modeling.backbone.resnet import BottleneckBlock

    blocks = {50: [3, 4, 6, 3], 101: [3, 4, 23, 3]}[depth]
    outputs = [32, 64, 128, 256]
    return [
        LazyCall(ResNet.make_stage)(
            block_class=BottleneckBlock, num_blocks=count, stride_per_block=[1 if out == 32 else 2] + [1] * (count - 1),
            in_channels=16 if out == 32 else out // 2, out_channels=out, bottleneck_channels=out // 2,
            stride_in_1x1=stride_in_1x1, norm=norm,
        )
        for count, out in zip(blocks, outputs)
    ]  # fmt: skip


def architectures(only):
    """{signature: (names, build, inputs)}, and the configs that cannot be read, with the reason."""
    found, unreadable = {}, {}
    root = zoo_dir()
    paths = [path for path in sorted((*root.rglob("*.yaml"), *root.rglob("*.py"))) if path.parent.name != "common"]
    for path in paths:
        name = path.relative_to(root).as_posix()
        if path.name.startswith("Base-") or "common/" in name or only not in name:
            continue
        try:
            signature, build, inputs = (yaml_model if path.suffix == ".yaml" else lazy_model)(path)
        except Exception as error:
            unreadable[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        found.setdefault((path.suffix, str(signature), str(inputs)), ([], build, inputs))[0].append(name)
    return list(found.values()), unreadable


# Inputs


def batch(inputs, seed):
    """Two images with two objects each."""
    generator = torch.Generator().manual_seed(seed)
    height, width = SIZE
    samples = []
    for _ in range(2):
        boxes = torch.tensor([[4.0, 6, 34, 32], [26.0, 14, 60, 45]]) + torch.rand(2, 4, generator=generator)
        target = Instances(SIZE, gt_boxes=Boxes(boxes), gt_classes=torch.tensor([0, inputs["classes"] - 1]))
        polygons = [[[x1, y1, x2, y1, x2, y2, x1, y2]] for x1, y1, x2, y2 in boxes.tolist()]
        masks = PolygonMasks(polygons)
        target.gt_masks = BitMasks.from_polygon_masks(masks, height, width) if inputs["bitmask"] else masks
        if inputs["keypoints"]:
            points = torch.rand(2, inputs["keypoints"], 3, generator=generator)
            points = points * (boxes[:, None, 2:] - boxes[:, None, :2]).repeat(1, 1, 2)[..., :3] + boxes[:, None, :3]
            points[..., 1] = points[..., 1].clamp(max=height - 1)
            points[..., 2] = 2
            target.gt_keypoints = Keypoints(points)
        sample = {
            "image": torch.rand(3, height, width, generator=generator) * 255,
            "instances": target,
            "sem_seg": torch.randint(0, inputs["stuff"], SIZE, generator=generator),
            "height": height,
            "width": width,
        }
        if inputs["proposals"]:
            corners = torch.rand(10, 2, generator=generator) * torch.tensor([40.0, 25.0])
            proposals = Boxes(torch.cat([corners, corners + 8 + 14 * torch.rand(10, 2, generator=generator)], dim=1))
            sample["proposals"] = Instances(SIZE, proposal_boxes=proposals, objectness_logits=torch.zeros(10))
        samples.append(sample)
    return samples


def calibrate(model, images):
    """Gives frozen norms, which are identities without pre-trained weights, the statistics of their inputs."""
    def measure(norm, args):
        (x,) = args
        norm.running_mean.copy_(x.mean((0, 2, 3)))
        norm.running_var.copy_(x.var((0, 2, 3)) + 1e-2)

    hooks = [m.register_forward_pre_hook(measure) for m in model.modules() if isinstance(m, FrozenBatchNorm2d)]
    with torch.no_grad():
        pixels = torch.stack([image["image"] for image in images])
        model.backbone((pixels - model.pixel_mean) / model.pixel_std)
    for hook in hooks:
        hook.remove()


# Runs


def ours(model, inputs, precision, choices):
    policy = PrecisionPolicy(precision, scaler=ScalerOptions(init_scale=128.0)).resolve("cpu")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    trainer = AMPTrainer(model, [batch(inputs, 1), batch(inputs, 2)], optimizer, policy=policy)
    seed_all_rng(1)
    losses = []
    trainer.after_step = lambda: losses.append({k: v.item() for k, v in trainer.last_step.losses.items()})
    with choices.recorded(model) if precision == "fp32" else choices.held(model):
        trainer.train(0, 2)
    if trainer.last_step.skips:
        return losses[0], None, f"{trainer.last_step.skips} skipped"
    with evaluating(model.eval(), PrecisionPolicy(precision)) as wrapped, torch.no_grad():
        return losses[0], wrapped(batch(inputs, 3)), None


def stock(model, inputs, precision, choices):
    """Detectron2's model under torch's autocast alone; gradients scaled in fp16 as its AMPTrainer does."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, enabled=precision == "fp16")
    seed_all_rng(1)
    first = None
    with EventStorage(), choices.held(model):
        for seed in (1, 2):
            with torch.autocast("cpu", dtype=dtype):
                losses = model.train()(batch(inputs, seed))
            first = first or {k: v.item() for k, v in losses.items()}
            optimizer.zero_grad()
            scaler.scale(sum(losses.values())).backward()
            scaler.step(optimizer)
            scaler.update()
    with torch.autocast("cpu", dtype=dtype), torch.no_grad():
        return first, model.eval()(batch(inputs, 3)), None


def verdict(run, model, inputs, precision, exact, choices):
    """pass, wrong or fails, with the reason."""
    try:
        losses, outputs, problem = run(copy.deepcopy(model), inputs, precision, choices)
    except Exception as error:
        return f"fails: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
    if problem:
        return f"wrong: {problem}"
    if exact is not None:
        total, expected = sum(losses.values()), sum(exact.values())
        if not abs(total - expected) <= TOLERANCE[precision] * abs(expected):
            return f"wrong: first losses sum to {total:.4g}, in fp32 to {expected:.4g}"
    low = {str(t.dtype) for t in tensors_in(outputs) if t.dtype in (torch.float16, torch.bfloat16)}
    return f"wrong: outputs in {', '.join(sorted(low))}" if low else "pass"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="part of the names of the configs to run")
    parser.add_argument("--json", type=Path, default=HERE / "results" / "zoo_matrix.json")
    parser.add_argument("--table", type=Path, default=HERE.parent / "docs" / "zoo_matrix.md")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    found, unreadable = architectures(args.only)
    rows = []
    for names, build, inputs in found:
        start = time.perf_counter()
        row = {"configs": names, "fp32": "pass"}
        try:
            seed_all_rng(0)
            model = build()
            calibrate(model, batch(inputs, 0))
            choices = Choices()
            exact = ours(copy.deepcopy(model), inputs, "fp32", choices)[0]
        except Exception as error:
            row["fp32"] = f"fails: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
        else:
            for precision in ("bf16", "fp16"):
                row[precision] = verdict(ours, model, inputs, precision, exact, choices)
                row[f"{precision}_stock"] = verdict(stock, model, inputs, precision, exact, choices)
        rows.append(row)
        cells = [row.get(key, "-").split(":")[0] for key in ("fp32", "bf16", "bf16_stock", "fp16", "fp16_stock")]
        print(f"{' '.join(cells):32} {time.perf_counter() - start:5.1f} s  {names[0]} (+{len(names) - 1})", flush=True)
    machine = {"cpu": cpu_model(), "torch": torch.__version__, "python": platform.python_version(), "detectron2": detectron2_build()}
    report = {"machine": machine, "rows": rows, "unreadable": unreadable}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    args.table.write_text(table(report))
    return any(row.get(key, "pass") != "pass" for row in rows for key in ("bf16", "fp16"))


def detectron2_build():
    from d2amp_ext import _compat

    return "with its compiled module" if _compat.has_compiled_ops() else "without its compiled module"


def table(report):
    machine = report["machine"]
    keys = ("fp32", "bf16", "bf16_stock", "fp16", "fp16_stock")
    lines = [
        "# Detectron2's zoo in 16 bit",
        "",
        "Generated by `benchmarks/zoo_matrix.py`; do not edit. Each architecture, shrunk in width and image size, makes two",
        "training steps and one evaluation, with the proposals, matches and samples of the fp32 run. `pass`: it runs, its",
        "first losses are within 5 % of fp32's, and what it returns is fp32. `stock` is the same model under torch's",
        "autocast alone.",
        "",
        f"Run on: {machine['cpu']}; torch {machine['torch']}, Python {machine['python']}, Detectron2 {machine['detectron2']}.",
        "",
        "| configs | fp32 | bf16 | bf16, stock | fp16 | fp16, stock |",
        "|---|---|---|---|---|---|",
    ]
    notes = []
    for row in report["rows"]:
        cells = []
        for key in keys:
            word, _, reason = row.get(key, "-").partition(": ")
            if reason and reason not in notes:
                notes.append(reason)
            cells.append(f"{word} ({notes.index(reason) + 1})" if reason else word)
        more = f" and {len(row['configs']) - 1} more" if len(row["configs"]) > 1 else ""
        lines.append(f"| `{row['configs'][0]}`{more} | " + " | ".join(cells) + " |")
    lines += ["", *(f"{number}. {note}".replace("|", "\\|") for number, note in enumerate(notes, 1))]
    for name, reason in report["unreadable"].items():
        lines += ["", f"Not run: `{name}`: {reason}"]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(main())
