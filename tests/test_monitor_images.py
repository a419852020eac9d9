"""Predictions in the Images tab: from real evaluations, without a random number and without harm."""

import copy
import io
import random

import numpy as np
import pytest
import torch
from detectron2.data import Metadata
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import TensorboardXWriter
from PIL import Image
from test_monitor_board import read

from d2amp_ext import PrecisionTrainer, load_cfg
from d2amp_ext.monitor import images
from d2amp_ext.monitor.board import Board
from d2amp_ext.monitor.images import PredictionImages, best, render


def instances(scores, size=(40, 60), dtype=torch.float32):
    found = Instances(size)
    found.pred_boxes = Boxes(torch.tensor([[5.0, 5.0, 30.0, 20.0]]).repeat(len(scores), 1))
    found.scores = torch.tensor(scores, dtype=dtype)
    found.pred_classes = torch.zeros(len(scores), dtype=torch.int64)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory, datasets_dir):
    """A run with evaluations after updates 2, 4 and at the end; its folder and the random states behind it."""
    from detectron2.utils.env import seed_all_rng

    def train(period):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DETECTRON2_DATASETS", str(datasets_dir))
            folder = tmp_path_factory.mktemp("images")
            opts = ["MODEL.DEVICE", "cpu", "OUTPUT_DIR", str(folder), "SOLVER.MAX_ITER", "6", "SEED", "1",
                    "DATALOADER.NUM_WORKERS", "0", "TEST.EVAL_PERIOD", "2", "MONITOR.PERIOD", str(period),
                    "SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION", "fp32"]  # fmt: skip
            seed_all_rng(1)
            trainer = PrecisionTrainer(load_cfg("quick/faster_rcnn_micro.yaml", opts))
            trainer.train()
            states = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
            return folder, trainer, states

    return {period: train(period) for period in (0, 3)}


def test_a_few_images_of_every_evaluation(run):
    events = read(run[3][0])
    tags = [tag for tag in events.Tags()["images"] if tag.startswith("predictions/")]
    assert tags == [f"predictions/{number}" for number in range(4)]
    for tag in tags:
        shown = events.Images(tag)
        assert [image.step for image in shown] == [1, 3, 6]  # the last one after training, as its scalars
        picture = np.asarray(Image.open(io.BytesIO(shown[0].encoded_image_string)))
        assert picture.std() > 10  # not one colour


def test_evaluation_and_training_are_the_same_with_pictures(run):
    (_, plain, before), (_, drawn, after) = run[0], run[3]
    assert before == after
    for one, two in zip(plain.model.state_dict().values(), drawn.model.state_dict().values()):
        assert torch.equal(one, two)
    results = [trainer._last_eval_results["bbox"] for trainer in (plain, drawn)]
    assert {k: v for k, v in results[0].items() if v == v} == {k: v for k, v in results[1].items() if v == v}


def test_no_hook_stays_on_the_model(run):
    assert not run[3][1].model._forward_hooks


class Model(torch.nn.Module):
    """Answers in evaluation with what it is told."""

    def __init__(self, answer):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.answer = answer

    def forward(self, batch):
        return self.answer


class Trainer:
    iter = 7

    class storage:
        iter = 7


def watch(tmp_path, answer, calls=1, training=False, batch=None):
    """What is drawn when a model gives an answer to a batch; returns the read events."""
    model = Model(answer).train(training)
    writer = TensorboardXWriter(str(tmp_path))
    hook = PredictionImages(Board([writer]), model)
    hook.trainer = Trainer
    hook.before_train()
    for _ in range(calls):
        model([{"image": torch.zeros(3, 40, 60)}] if batch is None else batch)
    hook.after_train()
    writer._writer.flush()
    writer.close()
    return read(tmp_path).Tags()["images"]


def test_no_more_than_a_few_are_drawn(tmp_path):
    tags = watch(tmp_path, [{"instances": instances([0.9])}], calls=7)
    assert len(tags) == images.IMAGES


@pytest.mark.parametrize("answer", [{"loss": torch.zeros(())}, [], [torch.zeros(1)], torch.zeros(3), None])
def test_models_that_answer_in_another_way_are_left_alone(tmp_path, answer):
    assert watch(tmp_path, answer) == []


def test_training_is_not_watched(tmp_path):
    assert watch(tmp_path, [{"instances": instances([0.9])}], training=True) == []


def test_what_cannot_be_drawn_is_said_once_and_ends_nothing(tmp_path, caplog):
    assert watch(tmp_path, [{"proposals": instances([0.9])}], calls=3) == []
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("No more pictures of predictions in TensorBoard: UserError: The model returns proposals")


def test_a_copy_of_the_model_draws_nothing_and_can_be_made(tmp_path):
    model = Model([{"instances": instances([0.9])}]).eval()
    hook = PredictionImages(Board([]), model)
    hook.trainer = Trainer
    hook.before_train()
    twin = copy.deepcopy(model)
    del hook
    twin([{"image": torch.zeros(3, 40, 60)}])


@pytest.mark.parametrize(
    "scores, kept",
    [([0.9, 0.2, 0.6], [0.9, 0.6]), ([0.1, 0.4, 0.2, 0.3], [0.4, 0.3, 0.2]), ([0.7] * 60, [0.7] * 50), ([], [])],
)
def test_the_confident_ones_else_the_best(scores, kept):
    assert best(instances(scores)).scores.tolist() == pytest.approx(kept)


def test_sixteen_bit_predictions_are_drawn():
    found = instances([0.9], dtype=torch.bfloat16)
    sample = {"image": torch.zeros(3, 40, 60)}
    assert render(sample, {"instances": found}).max() > 0
    assert found.scores.dtype == torch.bfloat16  # those of the evaluation stay


def test_size_and_colours_are_those_of_the_image():
    blue = torch.zeros(3, 20, 30)
    blue[0] = 255
    sample = {"image": blue, "height": 40, "width": 60}
    empty = {"instances": instances([])}
    assert render(sample, empty, image_format="BGR")[20, 30].tolist() == [0, 0, 255]
    assert render(sample, empty, image_format="RGB")[20, 30].tolist() == [255, 0, 0]
    assert render(sample, empty).shape == (40, 60, 3)


def test_large_images_are_made_smaller():
    sample = {"image": torch.zeros(3, 100, 200), "height": 1000, "width": 2000}
    assert render(sample, {"instances": instances([], (1000, 2000))}).shape == (400, 800, 3)


def test_semantic_and_panoptic_predictions():
    sample = {"image": torch.zeros(3, 40, 60)}
    metadata = Metadata(stuff_classes=["sky", "road"], thing_classes=["car"], stuff_colors=[[9, 99, 9], [1, 1, 200]])
    semantic = {"sem_seg": torch.stack([torch.zeros(40, 60), torch.ones(40, 60)])}
    assert render(sample, semantic, metadata).max() > 50
    segments = torch.ones(40, 60, dtype=torch.int32)
    panoptic = {"panoptic_seg": (segments, [{"id": 1, "isthing": True, "category_id": 0, "score": 0.9}])}
    assert render(sample, panoptic, metadata).max() > 50
