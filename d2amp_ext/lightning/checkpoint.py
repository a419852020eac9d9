"""Checkpoints of a Lightning run: last.ckpt to go on from, model_final.pth for everybody else."""

import os

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from ..checkpoint import PrecisionCheckpointer, plain, read, write_whole
from ..lightning_files import LAST


class PlainCheckpointIO(TorchCheckpointIO):
    """Writes files of plain types and tensors that are whole or not there; reads no others unless told to.

    In Lightning 2.4 and 2.5, reading a checkpoint runs the code in it.
    """

    def __init__(self, trust=False):
        """
        Args:
            trust (bool): whether files may hold pickled objects of any kind.
        """
        self._trust = trust

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        path = os.fspath(path)
        if "://" in path or storage_options is not None:
            super().save_checkpoint(plain(checkpoint), path, storage_options)
            return
        write_whole(path, lambda file: torch.save(plain(checkpoint), file))

    def load_checkpoint(self, path, map_location=None, weights_only=None):
        """As in Lightning.

        Raises:
            CheckpointError: for a file that is damaged, or would run code.
        """
        return read(os.fspath(path), self._trust or weights_only is False)


class LightningCheckpointer(PrecisionCheckpointer):
    """Writes last.ckpt whenever a checkpoint is due, and at the end Detectron2's model_final.pth as well."""

    def __init__(self, model, save_dir, write_last):
        """
        Args:
            model (nn.Module):
            save_dir (str):
            write_last (callable): writes Lightning's checkpoint to a path; called on all ranks.
        """
        super().__init__(model, save_dir)
        self._write_last = write_last

    def save(self, name, **kwargs):
        path = os.path.join(self.save_dir, LAST)
        self.logger.info(f"Saving checkpoint to {path}")
        self._write_last(path)
        if name == "model_final":
            super().save(name, **kwargs)
