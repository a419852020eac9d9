"""A restored loader gives the batches, augmentation included, that the uninterrupted one would have given."""

import operator
import random

import numpy as np
import pytest
import torch
from detectron2.data import build_detection_train_loader
from detectron2.data.common import AspectRatioGroupedDataset, DatasetFromList, MapDataset, ToIterableDataset
from detectron2.data.samplers import RandomSubsetTrainingSampler, RepeatFactorTrainingSampler, TrainingSampler
from torch.utils import data as torchdata

from d2amp_ext import random_state
from d2amp_ext.data.position import DataPosition

SHAPES = [(4, 3), (3, 4), (4, 3), (4, 3), (3, 4), (4, 3), (4, 3)]
SAMPLES = [{"width": w, "height": h, "number": number} for number, (w, h) in enumerate(SHAPES * 3)]


def augment(sample):
    """Draws from all three generators, as mappers do, and leaves half of a pair of normals behind."""
    return {**sample, "drawn": (random.gauss(0, 1), np.random.randn(), torch.rand(()).item())}


SAMPLERS = {
    "training": lambda: TrainingSampler(len(SAMPLES), seed=5),
    "in order": lambda: TrainingSampler(len(SAMPLES), shuffle=False),
    "subset": lambda: RandomSubsetTrainingSampler(len(SAMPLES), 0.5, seed_shuffle=5, seed_subset=5),
    "repeat factor": lambda: RepeatFactorTrainingSampler(torch.linspace(1, 2, len(SAMPLES)), seed=5),
    # Without a seed, a sampler draws its own.
    "training, own seed": lambda: TrainingSampler(len(SAMPLES)),
    "subset, own seed": lambda: RandomSubsetTrainingSampler(len(SAMPLES), 0.5),
    "repeat factor, own seed": lambda: RepeatFactorTrainingSampler(torch.linspace(1, 2, len(SAMPLES))),
}


def make(sampler="training", grouping=True, workers=0, mapper=augment, **options):
    return build_detection_train_loader(
        list(SAMPLES), mapper=mapper, sampler=SAMPLERS[sampler](), total_batch_size=3, aspect_ratio_grouping=grouping,
        num_workers=workers, **options,
    )  # fmt: skip


def seed(number):
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


@pytest.fixture(autouse=True)
def _seeded():
    before = random_state.capture()
    seed(3)
    yield
    random_state.restore(before)


def take(batches, count):
    """The next batches, and the random states after each, as values that compare."""
    taken = []
    for _ in range(count):
        batch = [(sample["number"], sample["drawn"]) for sample in next(batches)]
        taken.append((batch, random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()))
    return taken


class Run:
    """What the trainer does: it follows a loader, saves where it stands, and a new process goes on from there."""

    def __init__(self, make, state=None):
        loader = make()
        self.position = DataPosition(loader)
        if state is not None:
            assert self.position.restore(state["data"]) is None
        self.batches = iter(loader)
        if state is not None:
            random_state.restore(state["random"])

    def save(self, path):
        torch.save({"data": self.position.state_dict(), "random": random_state.capture()}, path)
        return torch.load(path, weights_only=True)


def resumed_like_uninterrupted(make, tmp_path, consumed, ahead=7):
    first = Run(make)
    take(first.batches, consumed)
    state = first.save(tmp_path / "state.pth")
    expected = take(first.batches, ahead)
    seed(99)  # a new process has drawn other numbers
    second = Run(make, state)
    assert take(second.batches, ahead) == expected
    # The position goes on being right: a third process, after the second was stopped.
    take(second.batches, 2)
    state = second.save(tmp_path / "state.pth")
    expected = take(second.batches, ahead)
    seed(98)
    assert take(Run(make, state).batches, ahead) == expected
    return state["data"]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("grouping", [True, False])
@pytest.mark.parametrize("consumed", [1, 2, 5, 9])
def test_the_rest_is_what_it_would_have_been(tmp_path, sampler, grouping, consumed):
    """Found: with a seed that the sampler draws itself, as in Detectron2 with SEED -1, another order was gone on with."""
    resumed_like_uninterrupted(lambda: make(sampler, grouping), tmp_path, consumed)


def test_samples_wait_in_either_group():
    """Else the test above would show less than it seems to. The group that gave the last batch is empty."""
    run = Run(make)
    kinds = set()
    for _ in range(40):
        take(run.batches, 1)
        kinds.add(tuple(sample["group"] for sample in run.position.state_dict()["waiting"]))
    assert kinds == {(), (0,), (0, 0), (1,), (1, 1)}


def test_a_collate_function(tmp_path):
    resumed_like_uninterrupted(lambda: make(collate_fn=lambda batch: [dict(sample) for sample in batch]), tmp_path, 4)
    resumed_like_uninterrupted(lambda: make(grouping=False, collate_fn=lambda batch: batch[::-1]), tmp_path, 4)


def unlucky(sample):
    """A mapper that cannot use some samples: Detectron2 tries others, which it picks by a generator of its own."""
    return None if sample["number"] % 4 == 0 else augment(sample)


@pytest.mark.parametrize("grouping", [True, False])
@pytest.mark.parametrize("consumed", [1, 4, 8])
def test_samples_that_cannot_be_used(tmp_path, grouping, consumed):
    """Found: after a resume other samples were tried than in the uninterrupted run."""
    state = resumed_like_uninterrupted(lambda: make(grouping=grouping, mapper=unlucky), tmp_path, consumed)
    assert 0 < len(state["retries"]["unusable"]) <= 6


def test_detectron2s_loader_of_a_cfg(tmp_path, monkeypatch, datasets_dir):
    """Images, random scales and flips: every pixel and every box."""
    monkeypatch.setenv("DETECTRON2_DATASETS", str(datasets_dir))
    from d2amp_ext import load_cfg
    from d2amp_ext.data.register import register_datasets

    cfg = load_cfg("quick/faster_rcnn_micro.yaml", ["DATALOADER.NUM_WORKERS", "0"])
    register_datasets(cfg)

    def content(batches, count):
        return [[(s["file_name"], s["image"].sum().item(), tuple(s["image"].shape),
                  s["instances"].gt_boxes.tensor.tolist()) for s in next(batches)] for _ in range(count)]  # fmt: skip

    first = Run(lambda: build_detection_train_loader(cfg))
    content(first.batches, 3)
    state = first.save(tmp_path / "state.pth")
    expected = content(first.batches, 4)
    seed(99)
    assert content(Run(lambda: build_detection_train_loader(cfg), state).batches, 4) == expected


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("grouping", [True, False])
@pytest.mark.parametrize("mapper", [augment, unlucky])
def test_following_a_loader_changes_nothing_that_it_draws(sampler, grouping, mapper):
    plain = take(iter(make(sampler, grouping, mapper=mapper)), 12)
    seed(3)
    run = Run(lambda: make(sampler, grouping, mapper=mapper))
    followed = []
    for _ in range(12):
        followed += take(run.batches, 1)
        run.position.state_dict()
    assert followed == plain


def test_a_loader_followed_twice(tmp_path):
    """A trainer whose inner trainer is exchanged follows the same loader again."""

    def make_twice():
        loader = make("training, own seed")
        DataPosition(loader)
        return loader

    resumed_like_uninterrupted(make_twice, tmp_path, 5)


def test_the_sampler_keeps_its_attributes():
    loader = make("repeat factor", grouping=False)
    inner = loader.dataset.sampler
    DataPosition(loader)
    assert isinstance(loader.dataset.sampler, torchdata.Sampler) and loader.dataset.sampler is not inner
    assert loader.dataset.sampler._seed == 5 and loader.dataset.sampler._frac_part is inner._frac_part
    with pytest.raises(AttributeError):
        loader.dataset.sampler.nothing


def test_a_checkpoint_does_not_grow():
    """What made the samples that went out already is forgotten."""
    run = Run(make)
    take(run.batches, 200)
    assert len(run.position._samples._made) <= 2 * 3 and len(run.position.state_dict()["waiting"]) <= 2 * 2


# What cannot be exact


def iterable_loader():
    class Stream(torchdata.IterableDataset):
        def __iter__(self):
            while True:
                yield from SAMPLES

    return build_detection_train_loader(Stream(), mapper=augment, total_batch_size=3, aspect_ratio_grouping=False)


def copying_loader():
    """As with pin_memory, which gives another dict than the data set made."""
    dataset = ToIterableDataset(MapDataset(DatasetFromList(SAMPLES), augment), SAMPLERS["training"]())
    loader = torchdata.DataLoader(dataset, collate_fn=lambda batch: dict(operator.itemgetter(0)(batch)))
    return AspectRatioGroupedDataset(loader, 3)


INEXACT = [
    (lambda: make(workers=2), "NUM_WORKERS is 2"),
    (lambda: make(workers=1, grouping=False), "NUM_WORKERS is 1"),
    (lambda: [[sample] for sample in SAMPLES], "not one of Detectron2's"),
    (lambda: torchdata.DataLoader(SAMPLES), "not one of Detectron2's"),
    (iterable_loader, "not one of Detectron2's"),
]


@pytest.mark.parametrize("made, why", INEXACT)
def test_loaders_that_cannot_be_exact_say_why(made, why):
    good = Run(make)
    take(good.batches, 2)
    position = DataPosition(made())
    assert why in position.state_dict()["obstacle"]
    assert why in position.restore(good.position.state_dict())
    assert why in DataPosition(make()).restore(position.state_dict())  # saved there, resumed in a loader that could


@pytest.mark.parametrize("made", [iterable_loader, lambda: torchdata.DataLoader(SAMPLES, collate_fn=list)])
def test_they_go_on_as_before(made):
    followed = made()
    DataPosition(followed)
    assert next(iter(followed))


def test_samples_that_are_copied_on_their_way_into_groups():
    """Found: a KeyError when the checkpoint was written."""
    run = Run(copying_loader)
    obstacles = []
    for _ in range(6):
        take(run.batches, 1)
        obstacles.append(run.position.state_dict().get("obstacle"))
    assert any(obstacle and "copies samples" in obstacle for obstacle in obstacles)


def test_another_data_set_starts_again():
    run = Run(make)
    take(run.batches, 4)
    state = run.position.state_dict()
    fresh = make()
    position = DataPosition(fresh)
    assert "had 5 samples and has 21" in position.restore({**state, "length": 5})
    seed(3)
    again = take(iter(fresh), 3)
    seed(3)
    assert again == take(iter(make()), 3)  # from the beginning, as if nothing had been tried


def test_states_of_the_first_versions_are_read():
    """Without the sampler's seed and the retries."""
    run = Run(make)
    take(run.batches, 4)
    state = run.position.state_dict()
    for name in ("order", "retries"):
        del state[name]
    for sample in state["waiting"]:
        del sample["retries"]
    random_states = random_state.capture()
    expected = take(run.batches, 3)
    assert take(Run(make, {"data": state, "random": random_states}).batches, 3) == expected
