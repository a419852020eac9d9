"""Where a training data loader stands, so that a resumed run sees the samples that the uninterrupted one would see."""

import logging
from types import SimpleNamespace

import torch.utils.data as torchdata
from detectron2.data.common import AspectRatioGroupedDataset, ToIterableDataset
from detectron2.data.samplers import RepeatFactorTrainingSampler, TrainingSampler
from torch.utils.data.sampler import Sampler

from .. import random_state

logger = logging.getLogger(__name__)
_ORDER = ("_seed", "_seed_subset", "_indexes_subset")  # of Detectron2's samplers


class DataPosition:
    """Follows a loader made by Detectron2's `build_detection_train_loader`, without changing what it draws.

    Exact with DATALOADER.NUM_WORKERS 0, where samples are made in this process. A sample that waits in an aspect-ratio
    group was augmented before the checkpoint: it is made again from the random state of that moment.
    """

    def __init__(self, loader):
        """
        Args:
            loader (iterable): not iterated yet.
        """
        self._grouped = _find(loader, AspectRatioGroupedDataset)
        self._loader = self._grouped.dataset if self._grouped else loader
        iterable = getattr(self._loader, "dataset", None)
        workers = getattr(self._loader, "num_workers", None)
        self.obstacle = None
        if not isinstance(self._loader, torchdata.DataLoader) or not isinstance(iterable, ToIterableDataset):
            self.obstacle = "the data loader is not one of Detectron2's"
        elif workers:
            self.obstacle = f"DATALOADER.NUM_WORKERS is {workers}, and only 0 can be exact"
        else:
            self._sampler = iterable.sampler = _CountingSampler(iterable.sampler)
            self._samples = iterable.dataset
            if self._grouped:
                self._samples = iterable.dataset = _RecordingDataset(iterable.dataset, self._grouped)

    def state_dict(self):
        """dict of plain types and tensors: "obstacle", or "drawn", "order", "length" and "waiting"."""
        if self.obstacle:
            return {"obstacle": self.obstacle}
        waiting = self._samples.waiting() if self._grouped else []
        order = self._sampler.order()
        return {"drawn": self._sampler.drawn, "order": order, "length": len(self._samples), "waiting": waiting}

    def restore(self, state):
        """Moves a fresh loader to where `state` was taken. Changes random states; the caller restores them after it.

        Returns:
            str or None: why that is not possible; the order of data then starts again.
        """
        obstacle = self.obstacle or state.get("obstacle")
        if not obstacle and state["length"] != len(self._samples):
            obstacle = f"the data set had {state['length']} samples and has {len(self._samples)}"
        if obstacle:
            return obstacle
        self._sampler.drawn = self._sampler.skip = state["drawn"]
        self._sampler.set_order(state.get("order", {}))
        for sample in state["waiting"]:
            random_state.restore(sample["random"])
            self._grouped._buckets[sample["group"]].append(self._samples[sample["index"]])
        if self._grouped:
            # Its iterator would be made, and draw a seed, at the first batch: too late for the caller.
            self._grouped.dataset = _Started(self._loader)
        return None


def _find(loader, kind):
    """The loader of type `kind` inside wrappers, or None."""
    while loader is not None and not isinstance(loader, kind):
        loader = getattr(loader, "_dataset", None)
    return loader


class _CountingSampler(Sampler):
    """Counts the indices taken, and leaves out the first `skip` of them."""

    def __init__(self, sampler):
        self._inner = sampler
        self.drawn = 0
        self.skip = 0

    def __iter__(self):
        for number, index in enumerate(self._inner):
            if number >= self.skip:
                self.drawn += 1
                yield index

    def order(self):
        """What decides the order of indices, where the sampler is Detectron2's; it may have drawn its seed by itself."""
        return {name: value for name, value in vars(self._detectron2s()).items() if name in _ORDER}

    def set_order(self, order):
        vars(self._detectron2s()).update(order)

    def _detectron2s(self):
        sampler = self._inner
        while isinstance(sampler, _CountingSampler):
            sampler = sampler._inner
        return sampler if isinstance(sampler, (TrainingSampler, RepeatFactorTrainingSampler)) else SimpleNamespace()

    def __len__(self):
        return len(self._inner)

    def __getattr__(self, name):
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)


class _RecordingDataset(torchdata.Dataset):
    """Remembers how each sample that may still wait in a group was made."""

    def __init__(self, dataset, grouped):
        self._dataset = dataset
        self._grouped = grouped
        self._made = {}

    def __len__(self):
        return len(self._dataset)

    def __getitem__(self, index):
        before = random_state.capture()
        before.pop("cuda", None)
        sample = self._dataset[index]
        self._forget()
        self._made[id(sample)] = (sample, index, before)
        return sample

    def waiting(self):
        """The samples in groups, in order: group number, index, and the random state they were made from."""
        return [
            {"group": number, "index": self._made[id(sample)][1], "random": self._made[id(sample)][2]}
            for number, group in enumerate(self._grouped._buckets)
            for sample in group
        ]

    def _forget(self):
        waiting = {id(sample) for group in self._grouped._buckets for sample in group}
        self._made = {key: value for key, value in self._made.items() if key in waiting}


class _Started:
    """A loader whose iterator exists already."""

    def __init__(self, loader):
        self._iterator = iter(loader)

    def __iter__(self):
        return self._iterator
