"""Detectron2's data loaders for Lightning, which must neither change nor count them."""

import logging
import time

from detectron2.engine import DefaultTrainer
from detectron2.utils import comm
from lightning.pytorch import LightningDataModule

from ..config import check_cfg, unused_amp_keys
from ..data.register import register_datasets
from ..default_trainer import PrecisionTrainer
from ..scaling import scale_to_world

logger = logging.getLogger(__name__)


class DataModule(LightningDataModule):
    """The data sets of a config.

    Attributes:
        cfg (CfgNode): as given; scaled to the number of ranks (SOLVER.REFERENCE_WORLD_SIZE) when the run starts.
        parts (type): the DefaultTrainer whose `build_train_loader` and `build_test_loader` make the loaders.
    """

    def __init__(self, cfg, parts=PrecisionTrainer):
        super().__init__()
        self.given = self.cfg = cfg
        self.parts = parts

    def setup(self, stage):
        self.cfg = for_this_run(self.given)

    def train_dataloader(self):
        return Stream(self.parts.build_train_loader(self.cfg))

    def val_dataloader(self):
        """For `Trainer.validate`: while a TrainingModule trains, Detectron2's hook evaluates."""
        return [Fixed(self.parts.build_test_loader(self.cfg, name)) for name in self.cfg.DATASETS.TEST]

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        """Left to the model, as in Detectron2: a sample holds more than tensors."""
        return batch


def for_this_run(cfg):
    """The cfg for the ranks that run, with its data sets registered.

    Raises:
        UserError: for values that cannot work.
    """
    check_cfg(cfg)
    register_datasets(cfg)
    unused = unused_amp_keys(cfg)
    if unused:
        logger.warning(f"SOLVER.AMP.ENABLED is False: {', '.join(unused)} have no effect.")
    world_size = comm.get_world_size()
    return DefaultTrainer.auto_scale_workers(scale_to_world(cfg, world_size), world_size)


class Stream:
    """An endless loader of training batches that takes one only when it is asked for one.

    Lightning takes a batch ahead from a loader that has no length, to see an end in time; samples would then be drawn,
    and random numbers with them, before the step that comes first. It leaves samplers of other types than torch's
    DataLoader alone.

    Attributes:
        loader (iterable): Detectron2's.
        take (callable): returns the next batch. Another one may be put in its place.
        before_batch (callable): called before a batch is taken.
        seconds (float): that the caller waited for batches since this was last set to 0.
    """

    LENGTH = 10**12

    def __init__(self, loader):
        self.loader = loader
        self.take = self._own
        self.before_batch = lambda: None
        self.seconds = 0.0
        self._iterator = None

    def _own(self):
        if self._iterator is None:
            self._iterator = iter(self.loader)
        return next(self._iterator)

    def __len__(self):
        return self.LENGTH

    def __iter__(self):
        return self  # the loader's own iterator draws a random number when it is made: at the first batch

    def __next__(self):
        self.before_batch()
        start = time.perf_counter()
        batch = self.take()
        self.seconds += time.perf_counter() - start
        return batch

    def state_dict(self):
        """Nothing: TrainingModule remembers where the data of every rank stands. Lightning warns of loaders without."""
        return {}

    def load_state_dict(self, state_dict):
        pass


class Fixed:
    """A loader of test images as it is. Lightning would exchange the sampler, and show some images twice."""

    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        return iter(self.loader)
