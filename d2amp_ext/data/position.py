"""Where a training data loader stands, so that a resumed run sees the samples that the uninterrupted one would see."""

import logging
import random
from types import SimpleNamespace

import torch.utils.data as torchdata
from detectron2.data.common import AspectRatioGroupedDataset, MapDataset, ToIterableDataset
from detectron2.data.samplers import RepeatFactorTrainingSampler, TrainingSampler
from torch.utils.data.sampler import Sampler

from .. import random_state

logger = logging.getLogger(__name__)
_ORDER = ("_seed", "_seed_subset", "_indexes_subset")  # of Detectron2's samplers
_FRESH_WORDS = random.Random(42).getstate()[1]  # how MapDataset begins


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
            self._retries = _Retries(iterable.dataset)
            if self._grouped:
                self._samples = iterable.dataset = _RecordingDataset(iterable.dataset, self._grouped, self._retries)

    def state_dict(self):
        """dict of plain types and tensors: "obstacle", or "drawn", "order", "length", "retries" and "waiting"."""
        if self.obstacle:
            return {"obstacle": self.obstacle}
        try:
            waiting = self._samples.waiting() if self._grouped else []
        except KeyError:
            return {"obstacle": "the data loader copies samples (pin_memory, collate_fn) before they are grouped"}
        return {
            "drawn": self._sampler.drawn,
            "order": self._sampler.order(),
            "length": len(self._samples),
            "retries": self._retries.capture(),
            "waiting": waiting,
        }

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
            self._retries.restore(sample.get("retries"))
            self._grouped._buckets[sample["group"]].append(self._samples[sample["index"]])
        self._retries.restore(state.get("retries"))
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

    def __init__(self, dataset, grouped, retries):
        self._dataset = dataset
        self._grouped = grouped
        self._retries = retries
        self._made = {}

    def __len__(self):
        return len(self._dataset)

    def __getitem__(self, index):
        before = random_state.capture()
        before.pop("cuda", None)
        made_from = {"index": index, "random": before, "retries": self._retries.capture()}
        sample = self._dataset[index]
        self._forget()
        self._made[id(sample)] = (sample, made_from)
        return sample

    def waiting(self):
        """The samples in groups, in order: group number, index, and the random states they were made from."""
        return [
            {"group": number, **self._made[id(sample)][1]}
            for number, group in enumerate(self._grouped._buckets)
            for sample in group
        ]

    def _forget(self):
        waiting = {id(sample) for group in self._grouped._buckets for sample in group}
        self._made = {key: value for key, value in self._made.items() if key in waiting}


class _Retries:
    """The state from which Detectron2's MapDataset picks another sample where the mapper returns None."""

    def __init__(self, dataset):
        self._dataset = dataset if isinstance(dataset, MapDataset) else None

    def capture(self):
        """None as long as nothing failed, else plain types."""
        if self._dataset is None:
            return None
        version, words, gauss = self._dataset._rng.getstate()
        if words == _FRESH_WORDS and len(self._dataset._fallback_candidates) == len(self._dataset):
            return None
        unusable = set(range(len(self._dataset))) - self._dataset._fallback_candidates
        return {"random": [version, list(words), gauss], "unusable": sorted(unusable)}

    def restore(self, state):
        if self._dataset is not None and state is not None:
            version, words, gauss = state["random"]
            self._dataset._rng.setstate((version, tuple(words), gauss))
            self._dataset._fallback_candidates = set(range(len(self._dataset))) - set(state["unusable"])


class _Started:
    """A loader whose iterator exists already."""

    def __init__(self, loader):
        self._iterator = iter(loader)

    def __iter__(self):
        return self._iterator
