"""Prediction on single images, in the precision of TEST.AMP."""

import inspect
import logging

from detectron2.data import Metadata, MetadataCatalog
from detectron2.engine import DefaultPredictor
from detectron2.modeling import GeneralizedRCNN, GeneralizedRCNNWithTTA

from .checkpoint import PrecisionCheckpointer, check_weights
from .config import add_amp_config, check_cfg
from .data.register import register_datasets
from .errors import UserError
from .evaluation import AutocastModel, in_precision
from .launch import choose_device
from .policy import PrecisionPolicy

logger = logging.getLogger(__name__)


class Predictor(DefaultPredictor):
    """DefaultPredictor in the precision of TEST.AMP, with fp32 outputs whatever the precision.

    With TEST.AMP.ENABLED False it predicts what DefaultPredictor predicts, bit for bit. TEST.AUG.ENABLED turns on
    Detectron2's test-time augmentation, and where there is no CUDA device the model runs on the CPU.

    Attributes:
        cfg (CfgNode): a copy of what was given, with the device that is used in MODEL.DEVICE.
        model (nn.Module): in evaluation mode.
        policy (PrecisionPolicy): of prediction, resolved when TEST.AMP is enabled.
        metadata (Metadata): of the first data set in DATASETS.TEST (else DATASETS.TRAIN); where that does not name as
            many classes as the model has, one that calls them "class 0", "class 1" ...

    Example:
        predictor = Predictor(load_cfg("output/config.yaml", ["MODEL.WEIGHTS", "output/model_final.pth"]))
        image = detectron2.data.detection_utils.read_image("input.jpg", format="BGR")
        instances = predictor(image)["instances"]
    """

    def __init__(self, cfg, trust=False):
        """
        Args:
            cfg (CfgNode): not changed; one without our keys predicts as in Detectron2.
            trust (bool): whether the weights may hold pickled objects of any kind, which can run code.

        Raises:
            UserError: for weights that are missing, damaged or would run code, a precision that the device cannot do,
                and test-time augmentation of a model that has none.
        """
        frozen = cfg.is_frozen()
        cfg = cfg.clone()
        cfg.defrost()
        add_amp_config(cfg)
        check_cfg(cfg)
        choose_device(cfg)
        policy = PrecisionPolicy.for_evaluation(cfg)
        policy.check(cfg.MODEL.DEVICE)
        weights = cfg.MODEL.WEIGHTS
        check_weights(weights)
        for name in dict.fromkeys((*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)):
            _register(cfg, name)

        # DefaultPredictor reads the weights by a checkpointer of its own, which would run code from them.
        cfg.MODEL.WEIGHTS = ""
        super().__init__(cfg)
        self.cfg.MODEL.WEIGHTS = weights
        if frozen:
            self.cfg.freeze()
        model = _with_tta(self.cfg, self.model) if cfg.TEST.AUG.ENABLED else self.model
        self.metadata = _class_metadata(self.cfg, self.model)
        if weights:
            checkpointer = PrecisionCheckpointer(self.model)
            checkpointer.trust = trust
            checkpointer.load(weights)
        else:
            logger.warning('MODEL.WEIGHTS is "": the model predicts from random weights.')
        self.model = in_precision(model, policy)
        self.policy = self.model.policy if isinstance(self.model, AutocastModel) else policy

    def __call__(self, original_image):
        """Predicts one image.

        Args:
            original_image (np.ndarray): (H, W, 3), BGR, from 0 to 255.

        Returns:
            dict: what the model returns for one image, such as {"instances": Instances}, with fp32 tensors.

        Raises:
            UserError: for an array of another shape.
        """
        if original_image.ndim != 3 or original_image.shape[2] != 3:
            raise UserError(f"The image has shape {original_image.shape}; it must be (height, width, 3) in BGR order.")
        with self.policy.float32_switches():
            return super().__call__(original_image)


def _with_tta(cfg, model):
    obstacle = None
    if cfg.MODEL.KEYPOINT_ON or cfg.MODEL.LOAD_PROPOSALS:
        obstacle = f"MODEL.{'KEYPOINT_ON' if cfg.MODEL.KEYPOINT_ON else 'LOAD_PROPOSALS'} True"
    # PanopticFPN is a GeneralizedRCNN too, but cannot predict masks for boxes that it is given.
    is_rcnn = isinstance(model, GeneralizedRCNN)
    if not is_rcnn or "detected_instances" not in inspect.signature(model.inference).parameters:
        obstacle = f"MODEL.META_ARCHITECTURE {cfg.MODEL.META_ARCHITECTURE}"
    if obstacle:
        raise UserError(
            "TEST.AUG.ENABLED = True: Detectron2 has test-time augmentation for R-CNN models with boxes and masks "
            f"only, and this config has {obstacle}. Set TEST.AUG.ENABLED False."
        )
    return GeneralizedRCNNWithTTA(cfg, model)


def _register(cfg, name):
    """Registers one data set of the cfg. Prediction needs its class names at most, so its files may be elsewhere."""
    only = cfg.clone()
    only.DATASETS.TRAIN, only.DATASETS.TEST = (), (name,)
    entries = cfg.DATASETS.REGISTER
    entries = (entries,) if isinstance(entries, str) else entries
    only.DATASETS.REGISTER = tuple(entry for entry in entries if str(entry).split("=")[0].strip() == name)
    try:
        register_datasets(only)
    except UserError as error:
        logger.warning(f"The class names of {name} are unknown. {error}")


def _class_metadata(cfg, model):
    """Metadata that names every class of the model: the data set's, with numbers where it names more or fewer."""
    dataset = next(iter((*cfg.DATASETS.TEST, *cfg.DATASETS.TRAIN)), None)
    known = Metadata() if dataset is None else MetadataCatalog.get(dataset)
    counts = {"thing": getattr(getattr(model, "roi_heads", model), "num_classes", None)}
    if hasattr(model, "sem_seg_head"):
        counts["stuff"] = cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES
    attributes = known.as_dict()
    for kind, count in counts.items():
        found = len(known.get(f"{kind}_classes") or ())
        if count is None or count == found:
            continue
        source = "DATASETS is empty" if dataset is None else f"{dataset} has {found}"
        logger.warning(f"The model has {count} {kind} classes and {source}: they are called class 0, class 1 ...")
        attributes = {name: value for name, value in attributes.items() if not name.startswith(f"{kind}_")}
        attributes[f"{kind}_classes"] = [f"class {number}" for number in range(count)]
    return known if attributes == known.as_dict() else Metadata(**attributes)
