import hashlib

import numpy as np
import pytest
import torch
from dataset_checks import fill, forget, mask_cfg, score_ground_truth
from detectron2.data import DatasetCatalog, MetadataCatalog, build_detection_test_loader, build_detection_train_loader
from detectron2.data.detection_utils import read_image

from d2amp_ext.data import shapes


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("datasets")
    shapes.register(root)
    yield root
    forget(*shapes.NAMES)


def digest(folder):
    files = sorted(p for p in folder.rglob("*") if p.suffix == ".json")
    pixels = [read_image(str(p)) for p in sorted(folder.rglob("*.png"))]
    return hashlib.sha256(b"".join([p.read_bytes() for p in files] + [p.tobytes() for p in pixels])).hexdigest()


def test_registering_makes_nothing_and_names_everything(tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path / "data"))
    try:
        shapes.register()
        shapes.register()
        for name, split in zip(shapes.NAMES, ("train", "val")):
            metadata = MetadataCatalog.get(name)
            assert metadata.thing_classes == ["rectangle", "disc", "triangle"]
            assert metadata.evaluator_type == "coco"
            assert metadata.image_root == str(tmp_path / "data" / "d2amp_shapes" / split)
            assert metadata.json_file == str(tmp_path / "data" / "d2amp_shapes" / "annotations" / f"{split}.json")
        assert not (tmp_path / "data").exists()
        assert len(DatasetCatalog.get(shapes.NAMES[1])) == 16
        assert (tmp_path / "data" / "d2amp_shapes").is_dir()
    finally:
        forget(*shapes.NAMES)


def test_counts_sizes_and_classes(root):
    train, val = (DatasetCatalog.get(name) for name in shapes.NAMES)
    assert (len(train), len(val)) == (64, 16)
    for records in (train, val):
        assert {(r["width"], r["height"]) for r in records} == {(128, 96), (96, 128)}
        seen = [a["category_id"] for r in records for a in r["annotations"]]
        assert set(seen) == {0, 1, 2} and min(np.bincount(seen)) > len(seen) // 6
        assert all(1 <= len(r["annotations"]) <= 5 for r in records)


def test_masks_lie_on_the_painted_objects(root):
    for record in DatasetCatalog.get("d2amp_shapes_val"):
        grey = read_image(record["file_name"], "RGB").astype(float)
        height, width = grey.shape[:2]
        masks = [fill(a["segmentation"], height, width) for a in record["annotations"]]
        assert np.sum(masks, axis=0).max() == 1, "objects overlap"
        ground = np.median(grey[~np.any(masks, axis=0)], axis=0)
        for mask, annotation in zip(masks, record["annotations"]):
            colour = np.median(grey[mask], axis=0)
            nearer = np.abs(grey - colour).sum(axis=2) < np.abs(grey - ground).sum(axis=2)
            x, y, w, h = (int(v) for v in annotation["bbox"])
            around = np.s_[max(y - 1, 0) : y + h + 2, max(x - 1, 0) : x + w + 2]
            overlap = (mask & nearer)[around].sum() / (mask | nearer)[around].sum()
            assert overlap > 0.85, (record["file_name"], annotation["category_id"], overlap)


def test_ground_truth_scores_100(root, tmp_path):
    scores = score_ground_truth("d2amp_shapes_val", tmp_path)
    assert scores["bbox"]["AP"] == pytest.approx(100) and scores["segm"]["AP"] == pytest.approx(100)
    assert scores["segm"]["AP-triangle"] == pytest.approx(100)


def test_the_set_is_the_same_each_time_and_touches_no_random_state(tmp_path):
    torch.manual_seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first, second = (shapes.prepare(tmp_path / name) for name in "ab")
    assert digest(first) == digest(second)
    assert torch.equal(before[0], torch.get_rng_state()) and (before[1] == np.random.get_state()[1]).all()


def test_detectron2s_loaders_take_it_with_default_settings(root):
    names = ["DATASETS.TRAIN", ("d2amp_shapes_train",), "DATASETS.TEST", ("d2amp_shapes_val",)]
    cfg = mask_cfg(*names, "SOLVER.IMS_PER_BATCH", 2, "INPUT.MIN_SIZE_TRAIN", (64,), "INPUT.MIN_SIZE_TEST", 64)
    batch = next(iter(build_detection_train_loader(cfg)))
    assert len(batch) == 2 and all(len(sample["instances"].gt_masks) > 0 for sample in batch)
    wide = [sample["image"].shape[2] > sample["image"].shape[1] for sample in batch]
    assert wide[0] == wide[1], "Detectron2 groups by aspect ratio"
    assert len(list(build_detection_test_loader(cfg, "d2amp_shapes_val"))) == 16
