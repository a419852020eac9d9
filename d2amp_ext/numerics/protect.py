"""What a policy keeps in fp32, put on a model once."""

import logging

import torch

from .. import _compat
from ..errors import UserError
from .island import unwrapped
from .modules import keep_in_fp32
from .shield import Protection, shield

logger = logging.getLogger(__name__)


def protect(model, policy):
    """Keeps in fp32 what `policy` says: the shield, and FP32_MODULES. In place; doing it twice changes nothing.

    Args:
        model (nn.Module): in DistributedDataParallel or not.
        policy (PrecisionPolicy): resolved.

    Returns:
        Protection

    Raises:
        UserError: for a pattern that matches nothing, and for operators that this Detectron2 was built without.
    """
    check_operators(model)
    is_low = policy.dtype in (torch.float16, torch.bfloat16)
    # The modules first: a shielded one that is named, too, is an island as a whole.
    islands = keep_in_fp32(model, policy.fp32_modules) if policy.precision != "off" else {}
    shielded, left_alone = shield(model) if is_low and policy.shield else ({}, ())
    protection = Protection(shielded, left_alone, islands)
    if islands or is_low and policy.shield:
        logger.info(f"Of this model: {protection.describe()}.")
    return protection


def check_operators(model):
    """Raises UserError when the model has rotated boxes and Detectron2 was built without its compiled module."""
    if _compat.has_compiled_ops():
        return
    for name, module in unwrapped(model).named_modules():
        if type(module).__name__ in ("RRPN", "RROIHeads", "ROIAlignRotated", "RotatedFastRCNNOutputLayers"):
            raise UserError(
                f"The model has rotated boxes ({name}: {type(module).__name__}), which need Detectron2's compiled module "
                "detectron2._C, and this Detectron2 has none. Build Detectron2 from its repository: d2amp setup "
                "--source official."
            )
