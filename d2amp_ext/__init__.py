"""Mixed-precision training and evaluation for Detectron2.

Importing this package is cheap: it registers nothing and imports neither torch nor Detectron2. Names are loaded when
they are first used.
"""

from .exports import lazy_names

__version__ = "0.1.0"

# Public name -> module that defines it.
_EXPORTS = {
    "add_amp_config": "config",
    "load_cfg": "config",
    "PrecisionPolicy": "policy",
    "ScalerOptions": "policy",
    "StepRecord": "step",
    "NonFiniteError": "step",
    "amp_step": "step",
    "fp32_island": "numerics.island",
    "protect": "numerics.protect",
    "AMPTrainer": "trainer",
    "TRAINER_REGISTRY": "trainer",
    "PrecisionTrainer": "default_trainer",
    "PrecisionTrainerMixin": "default_trainer",
    "PrecisionCheckpointer": "checkpoint",
    "Predictor": "predictor",
    "install": "patches.table",
    "uninstall": "patches.table",
    "UserError": "errors",
    "UnknownKeyError": "errors",
}

__all__ = sorted(_EXPORTS)
__getattr__, __dir__ = lazy_names(globals(), _EXPORTS)
