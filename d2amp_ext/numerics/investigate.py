"""When a step is looked into: the locator, the bundle on disk, and what the log and the last message say."""

import dataclasses
import logging
import os
import platform
import sys

import detectron2
import torch
from detectron2.utils import comm

from .. import random_state
from .bundle import FOLDER, write_bundle
from .island import clean_name, unwrapped
from .locate import locate

logger = logging.getLogger(__name__)

SKIPS_WITH_A_SCALER = 3  # in a row; a lone overflow is what backing off is for


class Investigator:
    """Looks into steps of a trainer that were not finite.

    All ranks look into the same steps, each into its own batches, and none waits for another. Whatever goes wrong in
    it is a line of the log and never an error of the run.
    """

    def __init__(self, model, optimizer, policy):
        """
        Args:
            model (nn.Module): in DistributedDataParallel or not.
            optimizer (torch.optim.Optimizer): for the learning rate.
            policy (PrecisionPolicy): resolved.
        """
        self._model, self._optimizer, self._policy = model, optimizer, policy
        self._folder = None
        self._origin = {"config": "", "config_kind": ""}
        self._with_weights = False

    def write_bundles(self, output_dir, config="", kind="", weights=False):
        """Turns bundles on. Without this call findings are only told.

        Args:
            output_dir (str): of the run.
            config (str): the config of the run as text, from which `d2amp replay` builds the model.
            kind (str): of the config: "yaml", "lazy", or "" where there is none.
            weights (bool): whether bundles hold the weights, too.
        """
        if "://" in output_dir:
            logger.warning(f"OUTPUT_DIR = {output_dir!r} is no local folder: bundles of bad steps are not written.")
            return
        self._folder = os.path.join(output_dir, FOLDER)
        self._origin, self._with_weights = {"config": config, "config_kind": kind}, weights

    def after_skip(self, record, batches, before):
        """Looks into a skipped step, unless it is a lone overflow that a scaler explains.

        Args:
            record (StepRecord):
            batches (list): of the step's window.
            before (tuple): the `random_state.snapshot` from before its forward pass.
        """
        overflow = record.cause == "gradient" and self._policy.uses_scaler
        if record.cause == "no_gradient" or overflow and record.skips_in_row != SKIPS_WITH_A_SCALER:
            return
        text = self._look(record, batches, before)
        if text:
            logger.warning(f"Iteration {record.iteration}: {text}")

    def explain(self, error, batches, before):
        """Looks into the step that ends the run, and adds what it found to the message.

        Args:
            error (NonFiniteError):
            batches, before: as for `after_skip`.
        """
        text = "" if error.record.cause == "no_gradient" else self._look(error.record, batches, before)
        if text:
            error.args = (f"{error} {text}", *error.args[1:])

    def _rates(self):
        return sorted({float(group["lr"]) for group in self._optimizer.param_groups})

    def _look(self, record, batches, before):
        policy = self._policy
        if policy.nonfinite == "retry_fp32" and policy.precision in ("fp16", "bf16"):
            policy = dataclasses.replace(policy, precision="fp32")  # in which it was not finite either
        try:
            random = random_state.plain(before)
            scale = record.scale.item() if policy.uses_scaler else 1.0
            finding = locate(self._model, batches, policy, scale=scale, random=random, iteration=record.iteration)
        except Exception as error:  # of the model, or out of memory: the run is no worse for it
            logger.warning(f"Iteration {record.iteration} could not be replayed: {type(error).__name__}: {error}")
            return ""
        text = " ".join(filter(None, [finding.describe(), finding.advice]))
        if self._folder is None or not (finding.found or comm.get_world_size() == 1):
            return text  # of several ranks, those write where it happened
        try:
            path = write_bundle(self._folder, self._bundle(record, batches, random, scale, finding))
        except Exception as error:  # a full disk, for example
            logger.warning(f"The bundle of iteration {record.iteration} was not written: {type(error).__name__}: {error}")
            return text
        return f"{text} To make this step again: d2amp replay {path}"

    def _bundle(self, record, batches, random, scale, finding):
        weights = unwrapped(self._model).state_dict() if self._with_weights else None
        return {
            "iteration": record.iteration,
            "rank": comm.get_rank(),
            "world_size": comm.get_world_size(),
            "cause": record.cause,
            "skips": [record.skips, record.skips_in_row],
            "precision": finding.precision,
            "device": str(self._policy.device),
            "scale": scale,
            "learning_rates": self._rates(),
            "losses": {name: value.item() for name, value in record.losses.items()},
            "random": random,
            "batches": batches,
            **self._origin,
            "versions": _versions(),
            "finding": finding.as_dict(),
            "weights": weights and {
                clean_name(name): value.cpu() for name, value in weights.items() if isinstance(value, torch.Tensor)
            },
        }  # fmt: skip


def _versions():
    package = __name__.partition(".")[0]  # whose __init__ loads what is upstream of this module
    return {
        package: sys.modules[package].__version__,
        "detectron2": detectron2.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
