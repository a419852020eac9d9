"""What several tests of data sets share: a cfg, and ground truth sent through Detectron2's loaders and evaluator."""

import numpy as np
import pycocotools.mask
import torch
from detectron2.config import get_cfg
from detectron2.data import DatasetCatalog, DatasetMapper, MetadataCatalog
from detectron2.evaluation import COCOEvaluator
from detectron2.structures import Instances


def mask_cfg(*opts):
    """Detectron2's defaults (so `INPUT.MASK_FORMAT` polygon) with masks on, and overrides."""
    cfg = get_cfg()
    cfg.merge_from_list(["MODEL.MASK_ON", True, "DATALOADER.NUM_WORKERS", 0, *opts])
    return cfg


def forget(*names):
    """Take data sets out of Detectron2's catalogs again."""
    for name in names:
        DatasetCatalog.pop(name, None)
        MetadataCatalog.pop(name, None)


def fill(polygons, height, width):
    """The pixels of polygons, (height, width) bool."""
    parts = pycocotools.mask.frPyObjects([np.asarray(p).tolist() for p in polygons], height, width)
    return pycocotools.mask.decode(pycocotools.mask.merge(parts)).astype(bool)


def score_ground_truth(name, output_dir, shift=0):
    """COCO results of a set's own objects, mapped by Detectron2's training mapper, as predictions.

    Args:
        name: a registered COCO set.
        output_dir: where the evaluator writes.
        shift: pixels by which the predictions are moved to the right, to see that the score can fall.
    """
    dicts = DatasetCatalog.get(name)
    mapper = DatasetMapper(mask_cfg(), is_train=True, augmentations=[])
    evaluator = COCOEvaluator(
        name, tasks=("bbox", "segm"), distributed=False, output_dir=str(output_dir), use_fast_impl=False
    )
    evaluator.reset()
    for record in dicts:
        mapped = mapper(record)
        truth, (height, width) = mapped["instances"], mapped["image"].shape[1:]
        assert (height, width) == (record["height"], record["width"]) == truth.image_size
        assert len(truth) == len(record["annotations"])
        polygons = truth.gt_masks.polygons if truth.has("gt_masks") else []  # Detectron2 adds none to an empty image
        masks = [fill(parts, height, width) for parts in polygons]
        predicted = Instances(truth.image_size)
        predicted.pred_boxes = truth.gt_boxes
        predicted.pred_boxes.tensor[:, 0::2] += shift
        predicted.pred_classes = truth.gt_classes
        predicted.scores = torch.ones(len(truth))
        predicted.pred_masks = torch.from_numpy(np.roll(np.reshape(masks, (-1, height, width)), shift, axis=2))
        evaluator.process([mapped], [{"instances": predicted}])
    return evaluator.evaluate()
