"""The size of an update beside that of the weights."""

import math

import pytest
import torch
from conftest import TinyModel, tiny_data
from monitor_runs import Note, history, latest, tiny_trainer, watched

from d2amp_ext.monitor.updates import UpdateScalars


def norm(tensors):
    return torch.cat([t.flatten() for t in tensors]).norm().item()


@pytest.mark.parametrize("precision", ["fp32", "off"])
def test_against_weights_kept_by_hand(precision):
    kept = []

    def keep(trainer):
        kept.append({name: p.detach().clone() for name, p in trainer.model.named_parameters()})

    trainer = watched(tiny_trainer(precision, lr=0.01), period=5, steps=5, hooks=[Note(keep)])
    for stage in ("first", "second", ""):
        names = [name for name in kept[0] if name.startswith(stage)]
        update, weight = norm([kept[4][n] - kept[3][n] for n in names]), norm([kept[4][n] for n in names])
        found = latest(trainer, "precision/update_to_weight_log2" + (stage and f"/{stage}"))
        assert found == pytest.approx(math.log2(update / weight), abs=1e-4)


def test_a_skipped_update_has_none():
    trainer = watched(tiny_trainer(data=tiny_data(20, spoil=(4,))), period=5, steps=10)
    assert [i for _, i in history(trainer, "precision/update_to_weight_log2")] == [9]


def test_weights_that_are_zero_and_stay_zero():
    model = TinyModel()
    with torch.no_grad():
        model.second.weight.zero_()
        model.second.bias.fill_(1.0)
    trainer = watched(tiny_trainer(model=model, lr=0.0), period=1, steps=1)
    assert not history(trainer, "precision/update_to_weight_log2/first")


def test_no_copy_of_the_weights_outlives_its_step():
    trainer = tiny_trainer()
    sizes = []

    def look(trainer):
        sizes.extend(len(hook._before) for hook in trainer._hooks if isinstance(hook, UpdateScalars))

    watched(trainer, hooks=[Note(look)])
    assert sizes == [0] * 10


def test_weights_of_several_types():
    model = TinyModel()
    model.second.bfloat16()

    class Mixed(TinyModel):
        def forward(self, batch):
            x = torch.cat([sample["x"] for sample in batch])
            return {"loss": self.second(torch.relu(self.first(x)).bfloat16()).float().pow(2).mean()}

    model.__class__ = Mixed
    trainer = watched(tiny_trainer("off", model=model), period=1, steps=1)
    for stage in ("first", "second"):
        assert -20 < latest(trainer, f"precision/update_to_weight_log2/{stage}") < 0
