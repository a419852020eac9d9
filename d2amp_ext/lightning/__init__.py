"""Training with Lightning 2.4 to 2.6, with the config, the precision and the losses of `d2amp train`.

    trainer = lightning.Trainer(**trainer_options(cfg))
    trainer.fit(TrainingModule(cfg), DataModule(cfg))

A LightningModule of one's own takes the policy alone: `Trainer(plugins=[PolicyPrecision(PrecisionPolicy("bf16"))])`.
Names are loaded, and Lightning is asked for, when they are first used.
"""

import importlib

from .. import _compat

# Public name -> module of this package that defines it.
_EXPORTS = {
    "TrainingModule": "module",
    "DataModule": "data",
    "PolicyPrecision": "precision",
    "trainer_options": "options",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name):
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        _compat.check_lightning()
        module = importlib.import_module(f".{_EXPORTS[name]}", __name__)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(__name__):
            raise
        raise _compat.missing_package_error(f"{__name__}.{name}", error) from error
    value = globals()[name] = getattr(module, name)
    return value


def __dir__():
    return sorted({*globals(), *__all__})
