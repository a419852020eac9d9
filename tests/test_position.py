"""A restored loader gives the batches, augmentation included, that the uninterrupted one would have given."""

import random

import numpy as np
import pytest
import torch
from detectron2.data import build_detection_train_loader
from detectron2.data.build import build_batch_data_loader
from detectron2.data.common import DatasetFromList, MapDataset
from detectron2.data.samplers import RandomSubsetTrainingSampler, RepeatFactorTrainingSampler, TrainingSampler

from d2amp_ext import random_state
from d2amp_ext.data.position import DataPosition


def augment(sample):
    """Draws from all three generators, as mappers do."""
    drawn = (random.random(), np.random.rand(), torch.rand(()).item())
    return {**sample, "drawn": drawn}


SHAPES = [(4, 3), (3, 4), (4, 3), (4, 3), (3, 4), (4, 3), (4, 3)]
SAMPLES = [{"width": w, "height": h, "number": number} for number, (w, h) in enumerate(SHAPES * 3)]

SAMPLERS = {
    "training": lambda: TrainingSampler(len(SAMPLES), seed=5),
    "subset": lambda: RandomSubsetTrainingSampler(len(SAMPLES), 0.5, seed_shuffle=5, seed_subset=5),
    "repeat factor": lambda: RepeatFactorTrainingSampler(torch.linspace(1, 2, len(SAMPLES)), seed=5),
}


def loader(sampler="training", grouping=True, workers=0):
    dataset = MapDataset(DatasetFromList(SAMPLES), augment)
    return build_batch_data_loader(
        dataset, SAMPLERS[sampler](), 4, aspect_ratio_grouping=grouping, num_workers=workers
    )


def seed():
    random.seed(3), np.random.seed(3), torch.manual_seed(3)


def take(iterator, count):
    return [[(sample["number"], sample["drawn"]) for sample in next(iterator)] for _ in range(count)]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("grouping", [True, False])
@pytest.mark.parametrize("consumed", [0, 1, 5, 9])
def test_the_rest_is_what_it_would_have_been(sampler, grouping, consumed):
    seed()
    first = loader(sampler, grouping)
    position, batches = DataPosition(first), iter(first)
    take(batches, consumed)
    saved, states = position.state_dict(), random_state.capture()
    expected = take(batches, 6)

    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    second = loader(sampler, grouping)
    restored = DataPosition(second)
    assert restored.restore(saved) is None
    batches = iter(second)
    random_state.restore(states)
    if consumed:  # before the first batch the seed that a fresh iterator draws is still to come
        assert take(batches, 6) == expected
    assert restored.state_dict()["drawn"] >= saved["drawn"]


def test_following_a_loader_changes_nothing_that_it_draws():
    seed()
    plain = take(iter(loader()), 8)
    seed()
    followed = loader()
    DataPosition(followed)
    assert take(iter(followed), 8) == plain


def test_a_state_is_plain(tmp_path):
    followed = loader()
    position, batches = DataPosition(followed), iter(followed)
    take(batches, 2)
    torch.save(position.state_dict(), tmp_path / "state.pth")
    loaded = torch.load(tmp_path / "state.pth", weights_only=True)
    assert loaded["drawn"] == position.state_dict()["drawn"] and loaded["length"] == len(SAMPLES)


@pytest.mark.parametrize("made, why", [(lambda: loader(workers=2), "NUM_WORKERS is 2"), (lambda: [1, 2], "not one of Detectron2's")])
def test_loaders_that_cannot_be_exact_say_why(made, why):
    position = DataPosition(made())
    assert why in position.state_dict()["obstacle"]
    assert why in DataPosition(made()).restore({"drawn": 1, "length": len(SAMPLES), "waiting": []})


def test_another_data_set_starts_again():
    position = DataPosition(loader())
    assert "had 5 samples" in position.restore({"drawn": 1, "length": 5, "waiting": []})


def test_detectron2s_own_builder_is_followed(monkeypatch, datasets_dir):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(datasets_dir))
    from d2amp_ext import load_cfg
    from d2amp_ext.data.register import register_datasets

    cfg = load_cfg("quick/faster_rcnn_micro.yaml")
    register_datasets(cfg)
    assert DataPosition(build_detection_train_loader(cfg)).obstacle is None
