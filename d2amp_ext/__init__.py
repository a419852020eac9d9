"""Mixed-precision training and evaluation for Detectron2.

Importing this package is cheap: it registers nothing and imports neither torch nor Detectron2. Names are loaded when
they are first used.
"""

import importlib

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


def __getattr__(name):
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f".{_EXPORTS[name]}", __name__)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(__name__):
            raise
        from ._compat import missing_package_error

        raise missing_package_error(f"{__name__}.{name}", error) from error
    value = globals()[name] = getattr(module, name)
    return value


def __dir__():
    return sorted({*globals(), *__all__})
