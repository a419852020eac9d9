"""The recipes in configs/: they load, say what their names say, and the quick ones train."""

import logging

import numpy as np
import pytest
import torch
from detectron2.config import LazyConfig, get_cfg, instantiate
from detectron2.data import DatasetCatalog, DatasetMapper, build_detection_test_loader, build_detection_train_loader
from detectron2.modeling import build_model
from detectron2.modeling.roi_heads import CascadeROIHeads
from detectron2.solver import build_lr_scheduler, build_optimizer
from detectron2.utils.env import seed_all_rng
from detectron2.utils.events import EventStorage

from d2amp_ext import config_files
from d2amp_ext.config import DEFAULTS, get_key, load_cfg
from d2amp_ext.data import shapes
from d2amp_ext.policy import PrecisionPolicy
from d2amp_ext.trainer import AMPTrainer

ROOT = config_files.packaged_dir()
PACKAGED = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.yaml"))
MICRO = ["quick/faster_rcnn_micro.yaml", "quick/mask_rcnn_micro.yaml", "quick/retinanet_micro.yaml"]
QUICK = ["quick/faster_rcnn_tiny.yaml", *MICRO]

# A bf16 recipe of ours -> (the zoo's recipe that it is, the heads its model must have, parameters in millions).
ZOO = {
    "COCO-Detection/faster_rcnn_R_50_FPN_1x": ("COCO-Detection/faster_rcnn_R_50_FPN_1x", {"box_head"}, 41.7),
    "COCO-Detection/faster_rcnn_R_50_FPN_3x": ("COCO-Detection/faster_rcnn_R_50_FPN_3x", {"box_head"}, 41.7),
    "COCO-Detection/retinanet_R_50_FPN_1x": ("COCO-Detection/retinanet_R_50_FPN_1x", {"head"}, 37.9),
    "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x": (
        "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x", {"box_head", "mask_head"}, 44.3),
    "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x": (
        "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x", {"box_head", "mask_head"}, 44.3),
    "COCO-Keypoints/keypoint_rcnn_R_50_FPN_1x": (
        "COCO-Keypoints/keypoint_rcnn_R_50_FPN_1x", {"box_head", "keypoint_head"}, 59.1),
    "COCO-PanopticSegmentation/panoptic_fpn_R_50_1x": (
        "COCO-PanopticSegmentation/panoptic_fpn_R_50_1x", {"box_head", "mask_head", "sem_seg_head"}, 46.0),
    "Misc/cascade_mask_rcnn_R_50_FPN_1x": ("Misc/cascade_mask_rcnn_R_50_FPN_1x", {"box_head", "mask_head"}, 72.0),
}  # fmt: skip

# The settings of the article that trains Faster R-CNN R50-C4 on PASCAL VOC in 16 bit.
ARTICLE = {
    "MODEL.META_ARCHITECTURE": "GeneralizedRCNN",
    "MODEL.BACKBONE.NAME": "build_resnet_backbone",
    "MODEL.ROI_HEADS.NAME": "Res5ROIHeads",
    "MODEL.WEIGHTS": "detectron2://ImageNetPretrained/MSRA/R-50.pkl",
    "MODEL.MASK_ON": False,
    "MODEL.RESNETS.DEPTH": 50,
    "MODEL.ROI_HEADS.NUM_CLASSES": 20,
    "INPUT.MIN_SIZE_TRAIN": (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800),
    "INPUT.MIN_SIZE_TEST": 800,
    "DATASETS.TRAIN": ("voc_2007_trainval", "voc_2012_trainval"),
    "DATASETS.TEST": ("voc_2007_test",),
    "SOLVER.IMS_PER_BATCH": 16,
    "SOLVER.BASE_LR": 0.1,
    "SOLVER.STEPS": (12000, 16000),
    "SOLVER.MAX_ITER": 18000,
    "SOLVER.WARMUP_ITERS": 100,
    "SOLVER.AMP.ENABLED": True,
    "TEST.AMP.ENABLED": False,
}


@pytest.fixture
def shapes_data(datasets_dir):
    shapes.register(datasets_dir)


def leaves(cfg, path=()):
    """{dotted key: value} of a cfg."""
    found = {}
    for name, value in cfg.items():
        found |= leaves(value, (*path, name)) if isinstance(value, dict) else {".".join((*path, name)): value}
    return found


def differing_keys(a, b):
    """The dotted keys in which two cfgs differ."""
    a, b = leaves(a), leaves(b)
    return {key for key in {*a, *b} if key not in a or key not in b or a[key] != b[key]}


def build(cfg):
    cfg.MODEL.DEVICE = "cpu"
    seed_all_rng(cfg.SEED)
    return build_model(cfg)


def build_on_meta(cfg):
    """The model at full size, without memory for its weights."""
    cfg.MODEL.DEVICE = "meta"
    with torch.device("meta"):
        return build_model(cfg)


def num_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_recipes_are_all_there():
    promised = {
        *QUICK,
        *(f"VOC/faster_rcnn_R_50_C4_{precision}.yaml" for precision in ("fp16", "bf16")),
        *(f"base/{precision}.yaml" for precision in ("fp16", "bf16")),
        *(f"{name}_bf16.yaml" for name in ZOO),
    }
    assert promised <= set(PACKAGED)


@pytest.mark.parametrize("name", PACKAGED)
def test_a_recipe_has_the_precision_of_its_name(name):
    cfg = load_cfg(name)
    assert cfg.MODEL.DEVICE == get_cfg().MODEL.DEVICE, "the tool chooses the device"
    suffix = name.removesuffix(".yaml").replace("/", "_").rsplit("_", 1)[-1]
    if name.startswith("quick/"):
        assert not cfg.SOLVER.AMP.ENABLED
    else:
        assert cfg.SOLVER.AMP.ENABLED
        expected = suffix if suffix in ("fp16", "bf16") else "auto"
        assert PrecisionPolicy.from_cfg(cfg).precision == expected
    if suffix in ("fp16", "bf16"):
        assert not cfg.TEST.AMP.ENABLED, "figures of a recipe must compare with published ones"


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_mix_in_changes_precision_and_nothing_else(precision, tmp_path):
    keys = {"SOLVER.AMP.ENABLED", "SOLVER.AMP.PRECISION", "TEST.AMP.PRECISION"}
    assert differing_keys(load_cfg(f"base/{precision}.yaml"), load_cfg()) == keys

    # what its comment tells the user to write
    zoo = "COCO-Detection/faster_rcnn_R_50_C4_1x.yaml"
    mine = tmp_path / "mine.yaml"
    mine.write_text(f'_BASE_: ["{zoo}", "base/{precision}.yaml"]\nSOLVER:\n  MAX_ITER: 7\n')
    cfg = load_cfg(str(mine))
    assert differing_keys(cfg, load_cfg(zoo)) == {*keys, "SOLVER.MAX_ITER"}
    cfg.TEST.AMP.ENABLED = True
    assert PrecisionPolicy.for_evaluation(cfg).precision == precision


@pytest.mark.parametrize("name", ZOO)
def test_a_coco_recipe_is_the_zoos_in_bf16(name):
    zoo, heads, millions = ZOO[name]
    cfg = load_cfg(f"{name}_bf16.yaml")
    assert (config_files.zoo_dir() / f"{zoo}.yaml").is_file()
    assert differing_keys(cfg, load_cfg(f"{zoo}.yaml")) == {
        "SOLVER.AMP.ENABLED", "SOLVER.AMP.PRECISION", "TEST.AMP.PRECISION"}  # fmt: skip
    model = build_on_meta(cfg)
    found = {child for path, _ in model.named_modules() for child in path.split(".") if child.endswith("head")}
    assert found >= heads and ("mask_head" in found) == ("mask_head" in heads)
    assert isinstance(getattr(model, "roi_heads", None), CascadeROIHeads) == ("cascade" in name)
    assert num_parameters(model) / 1e6 == pytest.approx(millions, abs=0.1)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_voc_recipes_are_the_articles(precision):
    name = f"VOC/faster_rcnn_R_50_C4_{precision}.yaml"
    cfg = load_cfg(name)
    assert {key: get_key(cfg, key) for key in ARTICLE} == ARTICLE
    zoo = load_cfg("PascalVOC-Detection/faster_rcnn_R_50_C4.yaml")
    assert differing_keys(cfg, zoo) == {"SOLVER.BASE_LR", "SOLVER.AMP.ENABLED", "SOLVER.AMP.PRECISION"}
    model = build_on_meta(cfg)
    assert model.roi_heads.box_predictor.cls_score.out_features == 21
    assert num_parameters(model) / 1e6 == pytest.approx(33.2, abs=0.1)


@pytest.mark.parametrize("name", QUICK)
def test_stock_detectron2_reads_the_quick_recipes(name):
    stock = get_cfg()
    stock.merge_from_file(str(ROOT / name))
    assert differing_keys(stock, load_cfg(name)) <= set(DEFAULTS)
    assert stock.SOLVER.MAX_ITER == 20 and stock.SEED >= 0 and stock.DATALOADER.NUM_WORKERS == 0
    assert stock.MODEL.WEIGHTS == "" and not stock.SOLVER.AMP.ENABLED


@pytest.mark.parametrize("name, parameters, pixels", [(QUICK[0], 1_000_000, 128), *((m, 500_000, 64) for m in MICRO)])
def test_quick_sizes_and_gradients(name, parameters, pixels, shapes_data):
    cfg = load_cfg(name)
    model = build(cfg)
    assert num_parameters(model) <= parameters

    batch = next(iter(build_detection_train_loader(cfg)))
    test_batches = list(build_detection_test_loader(cfg, cfg.DATASETS.TEST[0]))
    assert len(test_batches) == 16
    for sample in [*batch, *(sample for samples in test_batches for sample in samples)]:
        assert max(sample["image"].shape[-2:]) == pixels and min(sample["image"].shape[-2:]) == pixels * 3 // 4

    with EventStorage(0):
        sum(model(batch).values()).backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []

    model.eval()
    with torch.no_grad():
        (output,) = model(test_batches[0])
    assert 0 < len(output["instances"]) <= 20, "without predictions there is nothing to evaluate"
    assert output["instances"].has("pred_masks") == cfg.MODEL.MASK_ON
    assert cfg.MODEL.ROI_HEADS.NUM_CLASSES == len(shapes.THING_CLASSES)
    assert cfg.MODEL.META_ARCHITECTURE != "RetinaNet" or cfg.MODEL.RETINANET.NUM_CLASSES == len(shapes.THING_CLASSES)


def train(name, steps, precision):
    """Trains and returns (losses of every step as dicts, the trainer)."""
    cfg = load_cfg(name, ["SOLVER.MAX_ITER", steps])
    model = build(cfg)
    optimizer = build_optimizer(cfg, model)
    scheduler = build_lr_scheduler(cfg, optimizer)
    policy = PrecisionPolicy(precision=precision)
    trainer = AMPTrainer(model, build_detection_train_loader(cfg), optimizer, policy=policy)
    losses = []
    with EventStorage(0) as storage:
        for trainer.iter in range(steps):
            storage.iter = trainer.iter
            trainer.run_step()
            if not trainer.last_step.skipped:
                scheduler.step()
            factor = 1.0
            if hasattr(model, "loss_normalizer"):
                # a running count of foreground anchors that starts far off: divide by this batch's count instead
                anchors = cfg.SOLVER.IMS_PER_BATCH * storage.latest()["num_pos_anchors"][0]
                factor = model.loss_normalizer / max(1.0, anchors)
            losses.append({key: float(value) * factor for key, value in trainer.last_step.losses.items()})
    return losses, trainer


@pytest.mark.parametrize("name, steps, ratio", [*((name, 20, 0.85) for name in QUICK[:-1]), (QUICK[-1], 40, 0.97)])
def test_quick_losses_fall(name, steps, ratio, shapes_data):
    losses, trainer = train(name, steps, "fp32")
    totals = [sum(step.values()) for step in losses]
    assert np.isfinite(totals).all() and trainer.last_step.skips == 0
    assert np.mean(totals[-8:]) < ratio * np.mean(totals[:4])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", MICRO)
def test_micro_trains_in_16_bit(name, precision, shapes_data, caplog):
    caplog.set_level(logging.ERROR)  # the warning about emulation is no news here
    losses, trainer = train(name, 8, precision)
    exact, _ = train(name, 1, "fp32")
    assert all(np.isfinite(list(step.values())).all() for step in losses)
    assert sum(losses[0].values()) == pytest.approx(sum(exact[0].values()), rel=0.1)
    if precision == "bf16":
        assert trainer.last_step.skips == 0
    else:  # the default scale overflows a few times at first and settles far from 1
        assert trainer.last_step.skips <= 5 and trainer.grad_scaler.get_scale() >= 1024


def lazy(name):
    return LazyConfig.load(str(ROOT / name))


def test_lazy_train_has_the_twin_of_every_key():
    train = lazy("common/train.py").train
    sections = {"SOLVER.AMP.": train.amp, "TEST.AMP.": train.eval_amp, "FAST.": train.fast, "MONITOR.": train.monitor}
    expected = {prefix: {} for prefix in sections}
    for key, default in DEFAULTS.items():
        for prefix in sections:
            if key.startswith(prefix):
                node = expected[prefix]
                *path, name = key.removeprefix(prefix).lower().split(".")
                for part in path:
                    node = node.setdefault(part, {})
                node[name] = list(default) if isinstance(default, tuple) else default
    expected["SOLVER.AMP."]["enabled"] = False
    expected["TEST.AMP."]["enabled"] = False
    assert {prefix: dict(node) for prefix, node in sections.items()} == expected
    assert train.accumulate_steps == DEFAULTS["SOLVER.ACCUMULATE_STEPS"]

    train.amp.enabled = True
    assert PrecisionPolicy.from_lazy(train.amp) == PrecisionPolicy.from_cfg(load_cfg(opts=["SOLVER.AMP.ENABLED", True]))


def test_lazy_train_keeps_detectron2s_settings():
    ours = lazy("common/train.py").train
    stock = LazyConfig.load(str(config_files.zoo_dir() / "common/train.py")).train
    for name, value in stock.items():
        if name == "amp":
            assert ours.amp.enabled == value.enabled
        else:
            assert ours[name] == value


def test_every_lazy_setting_has_a_comment_above():
    lines = [line.strip() for line in (ROOT / "common/train.py").read_text().splitlines()]
    pairs = zip(lines, lines[1:])
    settings = [(above, line) for above, line in pairs if "=" in line and not line.startswith(("#", "train"))]
    assert len(settings) > 30
    assert [line for above, line in settings if not above.startswith("#")] == []


def test_the_lazy_micro_recipe_is_the_yaml_one(shapes_data):
    cfg, twin = load_cfg(MICRO[0]), lazy("quick/faster_rcnn_micro.py")
    model, other = build(cfg), instantiate(twin.model)
    assert {k: v.shape for k, v in model.state_dict().items()} == {k: v.shape for k, v in other.state_dict().items()}
    other.load_state_dict(model.state_dict())

    names = (twin.dataloader.train.dataset.names, twin.dataloader.test.dataset.names)
    assert names == (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)
    samples = DatasetCatalog.get(names[0])[:2]
    results = []
    for net, mapper in ((model, DatasetMapper(cfg, True)), (other, instantiate(twin.dataloader.train.mapper))):
        seed_all_rng(3)
        batch = [mapper(sample) for sample in samples]
        with EventStorage(0):
            losses = net(batch)
        sum(losses.values()).backward()
        results.append((batch, losses, [p.grad for p in net.parameters()]))
    assert all(torch.equal(a["image"], b["image"]) for a, b in zip(results[0][0], results[1][0]))
    assert results[0][1] == results[1][1]
    assert all(torch.equal(a, b) for a, b in zip(results[0][2], results[1][2]))

    model.eval(), other.eval()
    loaders = build_detection_test_loader(cfg, names[1]), instantiate(twin.dataloader.test)
    for batch, twin_batch in zip(*loaders, strict=True):
        assert torch.equal(batch[0]["image"], twin_batch[0]["image"])
    with torch.no_grad():
        mine, twins = model(batch)[0]["instances"], other(twin_batch)[0]["instances"]
    assert torch.equal(mine.pred_boxes.tensor, twins.pred_boxes.tensor) and torch.equal(mine.scores, twins.scores)


def test_the_lazy_micro_recipe_has_the_yaml_schedule(shapes_data):
    cfg, twin = load_cfg(MICRO[0]), lazy("quick/faster_rcnn_micro.py")
    model = build(cfg)
    twin.optimizer.params.model = model
    optimizer, other = build_optimizer(cfg, model), instantiate(twin.optimizer)
    by_id = {id(p): group for group in other.param_groups for p in group["params"]}
    settings = ("lr", "momentum", "weight_decay", "nesterov")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            assert [group[s] for s in settings] == [by_id[id(parameter)][s] for s in settings]

    scheduler, multiplier = build_lr_scheduler(cfg, optimizer), instantiate(twin.lr_multiplier)
    for step in range(cfg.SOLVER.MAX_ITER):
        expected = cfg.SOLVER.BASE_LR * multiplier(step / twin.train.max_iter)
        assert scheduler.get_last_lr()[0] == pytest.approx(expected)
        optimizer.step(), scheduler.step()

    assert (twin.train.max_iter, twin.train.seed) == (cfg.SOLVER.MAX_ITER, cfg.SEED)
    loader = twin.dataloader.train
    assert (loader.total_batch_size, loader.num_workers) == (cfg.SOLVER.IMS_PER_BATCH, cfg.DATALOADER.NUM_WORKERS)
    assert len(next(iter(instantiate(loader)))) == cfg.SOLVER.IMS_PER_BATCH
    assert instantiate(twin.dataloader.evaluator)._metadata.thing_classes == list(shapes.THING_CLASSES)
