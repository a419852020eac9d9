"""What is done with the predictions of one image: keep the confident ones, draw them, write them down."""

import numpy as np
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from detectron2.utils.visualizer import Visualizer
from pycocotools import mask as coco_mask

from .errors import UserError


def at_confidence(predictions, confidence):
    """The predictions of one image, less the instances with scores below `confidence`.

    Raises:
        UserError: when the model predicts nothing that can be drawn, such as proposals only.
    """
    if "instances" in predictions:
        instances = predictions["instances"]
        return {**predictions, "instances": instances[instances.scores >= confidence]}
    if "sem_seg" in predictions or "panoptic_seg" in predictions:
        return predictions
    raise UserError(
        f"The model returns {', '.join(predictions)}; drawn are instances, panoptic_seg and sem_seg. Choose a config "
        "of a whole detector."
    )


def draw(image, predictions, metadata):
    """Draws boxes, masks, keypoints, panoptic or semantic segments, whatever is there.

    Args:
        image (np.ndarray): (H, W, 3), BGR, from 0 to 255.
        predictions (dict): as `Predictor` returns it, on any device.
        metadata (Metadata): with the names of the classes, such as `Predictor.metadata`.

    Returns:
        np.ndarray: (H, W, 3), RGB, uint8.
    """
    visualizer = Visualizer(image[:, :, ::-1], metadata)
    if "panoptic_seg" in predictions:
        segments, info = predictions["panoptic_seg"]
        visualizer.draw_panoptic_seg_predictions(segments.to("cpu"), info)
    else:
        if "sem_seg" in predictions:
            visualizer.draw_sem_seg(predictions["sem_seg"].argmax(dim=0).to("cpu"))
        if "instances" in predictions:
            visualizer.draw_instance_predictions(predictions["instances"].to("cpu"))
    return visualizer.output.get_image()


def to_records(predictions, metadata, image):
    """Predictions of one image in the form of COCO's result files.

    Args:
        predictions (dict): as `Predictor` returns it.
        metadata (Metadata): class names, and the ids of the data set where it has some.
        image (str): what to write under "image".

    Returns:
        list[dict]: instances, then the segments of stuff, which have no score. `category_id` is the data set's id of
        the class, or its index from 0 where the data set has none. `bbox` is XYWH in pixels (of rotated boxes: centre,
        width, height, angle), `segmentation` COCO's compressed RLE.
    """
    records = []
    if "instances" in predictions:
        records += _instances(predictions["instances"].to("cpu"))
    for record in records:
        record.update(_category(metadata, "thing", record["category_id"]))
    for category, mask in _stuff(predictions):
        records.append({**_category(metadata, "stuff", category), **_segment(mask)})
    return [{"image": image, **record} for record in records]


def _instances(instances):
    if instances.has("pred_keypoints"):
        instances.pred_keypoints = instances.pred_keypoints.clone()  # Detectron2 shifts them in place
    records = instances_to_coco_json(instances, None)
    for record, box in zip(records, instances.pred_boxes.tensor.tolist()):
        del record["image_id"]
        if len(box) == 5:
            record["bbox"] = box
    return records


def _stuff(predictions):
    """Pairs of class and mask, an array (H, W): the segments of stuff, or the classes of a semantic segmentation."""
    if "panoptic_seg" in predictions:
        segments, info = predictions["panoptic_seg"]
        for segment in info or ():
            if not segment["isthing"]:
                yield segment["category_id"], (segments == segment["id"]).to("cpu").numpy()
    elif "sem_seg" in predictions:
        classes = predictions["sem_seg"].argmax(dim=0)
        for category in classes.unique().tolist():
            yield category, (classes == category).to("cpu").numpy()


def _segment(mask):
    rle = coco_mask.encode(np.asfortranarray(mask, dtype=np.uint8))
    return {
        "bbox": coco_mask.toBbox(rle).tolist(),
        "segmentation": {"size": rle["size"], "counts": rle["counts"].decode()},
    }


def _category(metadata, kind, index):
    names = metadata.get(f"{kind}_classes") or ()
    ids = {value: key for key, value in (metadata.get(f"{kind}_dataset_id_to_contiguous_id") or {}).items()}
    name = names[index] if index < len(names) else f"class {index}"
    return {"category_id": ids.get(index, index), "category_name": name}
