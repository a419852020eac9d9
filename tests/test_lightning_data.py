"""Loaders that Lightning leaves alone."""

import lightning
import pytest
import torch
from torch.utils.data import DataLoader

from d2amp_ext import UserError, load_cfg
from d2amp_ext.lightning import DataModule
from d2amp_ext.lightning.data import Fixed, Stream


class Watched(list):
    def __init__(self, *items):
        super().__init__(items)
        self.asked = []

    def __getitem__(self, index):
        self.asked.append(index)
        return super().__getitem__(index)


class Looking(lightning.LightningModule):
    def __init__(self, data):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.data = data
        self.asked, self.validated = [], []

    def training_step(self, batch, batch_idx):
        self.asked.append(list(self.data.asked))
        return self.layer(torch.ones(1)).sum()

    def validation_step(self, batch, batch_idx):
        self.validated.append(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
         "accelerator": "cpu"}  # fmt: skip


def test_no_batch_is_taken_before_its_step():
    data = Watched(*range(9))
    module = Looking(data)
    lightning.Trainer(max_steps=3, max_epochs=-1, **QUIET).fit(module, Stream(DataLoader(data, batch_size=None)))
    assert module.asked == [[0], [0, 1], [0, 1, 2]]


def test_the_iterator_is_made_with_the_first_batch():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    stream = Stream(DataLoader(list(range(9)), batch_size=None))
    assert iter(stream) is stream and torch.equal(torch.get_rng_state(), before)
    calls = []
    stream.before_batch = lambda: calls.append(stream.seconds)
    assert [next(stream) for _ in range(3)] == [0, 1, 2] and len(calls) == 3 and stream.seconds > 0
    assert not torch.equal(torch.get_rng_state(), before)


def test_a_fixed_loader_keeps_its_sampler_and_length():
    loader = DataLoader(list(range(7)), batch_size=2, sampler=[6, 0, 3])
    assert len(Fixed(loader)) == 2 and [batch.tolist() for batch in Fixed(loader)] == [[6, 0], [3]]
    module = Looking([])
    lightning.Trainer(**QUIET).validate(module, Fixed(loader), verbose=False)
    assert [batch.tolist() for batch in module.validated] == [[6, 0], [3]]


def test_the_data_of_a_config(datasets_dir, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(datasets_dir))
    data = DataModule(load_cfg("quick/faster_rcnn_micro.yaml", ["MODEL.DEVICE", "cpu"]))
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert len(batch) == 2 and "instances" in batch[0]
    (val,) = data.val_dataloader()
    assert len(val) == len(list(val)) and "file_name" in next(iter(val))[0]
    assert data.transfer_batch_to_device(batch, torch.device("meta"), 0) is batch


def test_values_that_cannot_work_are_a_mistake():
    cfg = load_cfg("quick/faster_rcnn_micro.yaml")
    cfg.SOLVER.ACCUMULATE_STEPS = 0
    with pytest.raises(UserError, match="ACCUMULATE_STEPS"):
        DataModule(cfg).setup("fit")
