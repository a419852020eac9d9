"""Training with Lightning 2.4 to 2.6, with the config, the precision and the losses of `d2amp train`.

    trainer = lightning.Trainer(**trainer_options(cfg))
    trainer.fit(TrainingModule(cfg), DataModule(cfg))

A LightningModule of one's own takes the policy alone: `Trainer(plugins=[PolicyPrecision(PrecisionPolicy("bf16"))])`.
Names are loaded, and Lightning is asked for, when they are first used.
"""

from .. import _compat
from ..exports import lazy_names

# Public name -> module of this package that defines it.
_EXPORTS = {
    "TrainingModule": "module",
    "DataModule": "data",
    "PolicyPrecision": "precision",
    "trainer_options": "options",
}

__all__ = sorted(_EXPORTS)
__getattr__, __dir__ = lazy_names(globals(), _EXPORTS, _compat.check_lightning)
