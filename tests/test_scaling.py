"""REFERENCE_WORLD_SIZE and ACCUMULATE_STEPS: an update sees as many images, at the same LR per image."""

import copy

import pytest
from detectron2.engine import DefaultTrainer

from d2amp_ext import UserError, load_cfg
from d2amp_ext.scaling import scale_to_world

stock = DefaultTrainer.auto_scale_workers


def config(reference, window=1, **solver):
    cfg = load_cfg(None, ["SOLVER.AMP.ENABLED", "True", "SOLVER.ACCUMULATE_STEPS", window, "TEST.EVAL_PERIOD", 1000])
    values = {"IMS_PER_BATCH": 16, "BASE_LR": 0.02, "MAX_ITER": 90000, "STEPS": (60000, 80000), "WARMUP_ITERS": 1000,
              "CHECKPOINT_PERIOD": 5000, "REFERENCE_WORLD_SIZE": reference, **solver}  # fmt: skip
    for name, value in values.items():
        cfg.SOLVER[name] = value
    return cfg


def numbers(cfg):
    names = ("IMS_PER_BATCH", "BASE_LR", "MAX_ITER", "STEPS", "WARMUP_ITERS", "CHECKPOINT_PERIOD", "REFERENCE_WORLD_SIZE")
    return {**{name: cfg.SOLVER[name] for name in names}, "EVAL_PERIOD": cfg.TEST.EVAL_PERIOD}


@pytest.mark.parametrize("reference, world", [(0, 1), (0, 8), (8, 8), (8, 1), (8, 16), (2, 3)])
def test_without_accumulation_it_is_detectron2s_own_scaling(reference, world):
    cfg = config(reference)
    before = copy.deepcopy(cfg)
    ours = scale_to_world(cfg, world)
    assert ours is cfg and cfg == before
    assert stock(ours, world) == stock(before, world)


@pytest.mark.parametrize("world, window", [(1, 2), (4, 2), (8, 4)])
def test_without_a_reference_nothing_is_scaled(world, window):
    cfg = config(0, window)
    assert scale_to_world(cfg, world) is cfg and stock(cfg, world) is cfg


def test_by_hand():
    """Made for 8 ranks of 2 images; run on 2 ranks with windows of 2: 4 of the 8 shares of an update."""
    scaled = scale_to_world(config(8, 2), 2)
    assert numbers(scaled) == {
        "IMS_PER_BATCH": 4,
        "BASE_LR": 0.01,
        "MAX_ITER": 180000,
        "STEPS": (120000, 160000),
        "WARMUP_ITERS": 2000,
        "CHECKPOINT_PERIOD": 10000,
        "REFERENCE_WORLD_SIZE": 2,
        "EVAL_PERIOD": 2000,
    }
    assert scaled.SOLVER.ACCUMULATE_STEPS == 2


@pytest.mark.parametrize("reference, world, window", [(8, 8, 2), (8, 1, 2), (8, 1, 8), (8, 4, 3), (8, 16, 4), (1, 1, 4), (2, 3, 5)])
def test_a_window_counts_like_that_many_ranks(reference, world, window):
    """The schedule is the one that Detectron2 makes for world x window ranks; a micro-batch is that of `world` ranks."""
    ours = numbers(scale_to_world(config(reference, window), world))
    as_ranks = numbers(stock(config(reference), world * window))
    assert ours["BASE_LR"] == pytest.approx(as_ranks["BASE_LR"])
    for name in ("MAX_ITER", "STEPS", "WARMUP_ITERS", "CHECKPOINT_PERIOD", "EVAL_PERIOD"):
        assert ours[name] == as_ranks[name], name
    assert ours["IMS_PER_BATCH"] == numbers(stock(config(reference), world))["IMS_PER_BATCH"]
    assert ours["REFERENCE_WORLD_SIZE"] == world


def test_the_window_that_makes_up_for_the_missing_ranks_changes_no_number_of_the_schedule():
    before = numbers(config(8))
    after = numbers(scale_to_world(config(8, 4), 2))
    assert {name: value for name, value in after.items() if before[name] != value} == {"IMS_PER_BATCH": 4, "REFERENCE_WORLD_SIZE": 2}


def test_detectron2_scales_nothing_after_us():
    ours = scale_to_world(config(8, 2), 2)
    assert stock(ours, 2) is ours


@pytest.mark.parametrize("frozen", [False, True])
def test_the_given_cfg_is_not_changed_and_a_frozen_one_stays_frozen(frozen):
    cfg = config(8, 2)
    if frozen:
        cfg.freeze()
    before = copy.deepcopy(cfg)
    scaled = scale_to_world(cfg, 2)
    assert scaled is not cfg and cfg == before
    assert scaled.is_frozen() == cfg.is_frozen() == frozen
    assert type(scaled) is type(cfg)


def test_it_is_logged(caplog):
    with caplog.at_level("INFO"):
        scale_to_world(config(8, 2), 2)
    (message,) = (record.getMessage() for record in caplog.records if record.name == "d2amp_ext.scaling")
    for word in ("8 to 2", "2 micro-batches", "IMS_PER_BATCH 4", "BASE_LR 0.01", "MAX_ITER 180000"):
        assert word in message


def test_numbers_never_shrink_to_nothing():
    """Found: a period of 1 became 0, which ends the run at its first step (CHECKPOINT_PERIOD) or turns evaluation off."""
    cfg = config(1, 8, IMS_PER_BATCH=2, MAX_ITER=3, CHECKPOINT_PERIOD=1, STEPS=(2,), WARMUP_ITERS=1)
    cfg.TEST.EVAL_PERIOD = 1
    scaled = numbers(scale_to_world(cfg, 1))
    assert [scaled[name] for name in ("MAX_ITER", "CHECKPOINT_PERIOD", "EVAL_PERIOD", "STEPS")] == [1, 1, 1, (1,)]


def test_what_is_off_stays_off():
    cfg = config(8, 2, WARMUP_ITERS=0, STEPS=())
    cfg.TEST.EVAL_PERIOD = 0
    scaled = numbers(scale_to_world(cfg, 2))
    assert (scaled["WARMUP_ITERS"], scaled["STEPS"], scaled["EVAL_PERIOD"]) == (0, (), 0)


@pytest.mark.parametrize("reference, batch", [(8, 12), (3, 16), (-1, 16)])
def test_a_reference_that_does_not_fit_the_batch(reference, batch):
    """Found: 12 images of 8 ranks were rounded to some number, where Detectron2 refuses them."""
    with pytest.raises(UserError, match=f"REFERENCE_WORLD_SIZE = {reference}.*IMS_PER_BATCH = {batch}"):
        scale_to_world(config(reference, 2, IMS_PER_BATCH=batch), 2)
