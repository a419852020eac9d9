"""What is found before a model is built: `check_run` and `check_output`."""

import os

import pytest
import torch
from detectron2.modeling import META_ARCH_REGISTRY

from d2amp_ext import UserError, _compat, load_cfg
from d2amp_ext.preflight import check_output, check_run


@pytest.fixture(autouse=True)
def _nothing_is_built(datasets_dir, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(datasets_dir))
    monkeypatch.setattr(META_ARCH_REGISTRY, "get", lambda name: pytest.fail("a model was built"))


def config(*opts):
    return load_cfg("quick/faster_rcnn_micro.yaml", ["MODEL.DEVICE", "cpu", *opts])


def test_a_good_run_passes_and_leaves_the_cfg_alone():
    cfg = config("SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION", "bf16", "TEST.AMP.ENABLED", "True")
    before = cfg.clone()
    cfg.freeze()
    assert check_run(cfg) is None
    assert cfg == before


SCHEDULE = [
    (["SOLVER.MAX_ITER", "0"], "SOLVER.MAX_ITER = 0.*--eval-only"),
    (["SOLVER.MAX_ITER", "-3"], "SOLVER.MAX_ITER = -3"),
    (["SOLVER.IMS_PER_BATCH", "0"], "SOLVER.IMS_PER_BATCH = 0"),
    (["SOLVER.IMS_PER_BATCH", "-2"], "SOLVER.IMS_PER_BATCH = -2"),
    (["SOLVER.BASE_LR", "0"], "SOLVER.BASE_LR = 0.0"),
    (["SOLVER.BASE_LR", "-0.1"], "SOLVER.BASE_LR = -0.1"),
    (["SOLVER.CHECKPOINT_PERIOD", "0"], "SOLVER.CHECKPOINT_PERIOD = 0"),
    (["SOLVER.CHECKPOINT_PERIOD", "-1"], "SOLVER.CHECKPOINT_PERIOD = -1"),
]


@pytest.mark.parametrize("opts, message", SCHEDULE)
def test_a_schedule_that_cannot_train(opts, message):
    with pytest.raises(UserError, match=message):
        check_run(config(*opts))


@pytest.mark.parametrize("opts, _", SCHEDULE)
def test_evaluation_needs_no_schedule(opts, _):
    check_run(config(*opts), train=False)


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -float("inf")])
def test_a_learning_rate_that_is_no_number(rate):
    """Found: NaN passed, and the first update would have made every weight NaN."""
    cfg = config()
    cfg.SOLVER.BASE_LR = rate
    with pytest.raises(UserError, match=f"SOLVER.BASE_LR = {rate}"):
        check_run(cfg)


@pytest.mark.parametrize("world, fits", [(1, True), (2, True), (4, True), (3, False), (8, False)])
def test_the_ranks_of_the_run_share_the_batch(world, fits):
    cfg = config("SOLVER.IMS_PER_BATCH", "4")
    if fits:
        check_run(cfg, world_size=world)
    else:
        with pytest.raises(UserError, match=f"SOLVER.IMS_PER_BATCH = 4: must be a multiple of the {world} rank"):
            check_run(cfg, world_size=world)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_with_a_reference_the_batch_is_that_of_other_ranks(world):
    """Found: 16 images of 8 ranks were refused on 3, where Detectron2 makes 6 of them."""
    cfg = config("SOLVER.IMS_PER_BATCH", "16", "SOLVER.REFERENCE_WORLD_SIZE", "8")
    check_run(cfg, world_size=world)
    cfg.SOLVER.IMS_PER_BATCH = 12
    with pytest.raises(UserError, match="SOLVER.IMS_PER_BATCH = 12.*8 rank.*REFERENCE_WORLD_SIZE"):
        check_run(cfg, world_size=world)


@pytest.mark.parametrize("section", ["SOLVER", "TEST"])
def test_a_precision_that_the_device_cannot_do(monkeypatch, section):
    monkeypatch.setattr(_compat, "native_precisions", lambda *args: (frozenset({"fp16"}), frozenset({"fp16"})))
    with pytest.raises(UserError, match="bf16.*Choose fp16"):
        check_run(config(f"{section}.AMP.ENABLED", "True", f"{section}.AMP.PRECISION", "bf16"))
    check_run(config(f"{section}.AMP.ENABLED", "False", f"{section}.AMP.PRECISION", "bf16"))  # nobody uses it


def test_bad_values_that_came_by_assignment():
    cfg = config()
    cfg.SOLVER.AMP.PRECISION = "fp17"
    with pytest.raises(UserError, match="SOLVER.AMP.PRECISION = 'fp17'"):
        check_run(cfg)


@pytest.mark.parametrize("train", [True, False])
def test_data_sets(train):
    key = "DATASETS.TRAIN" if train else "DATASETS.TEST"
    with pytest.raises(UserError, match=f"{key}.*d2amp_shapes_trian.*d2amp_shapes_train"):
        check_run(config(key, "('d2amp_shapes_trian',)"), train=train)
    with pytest.raises(UserError, match=f"{key} is empty"):
        check_run(config(key, "()"), train=train)


def test_weights(tmp_path):
    cfg = config("OUTPUT_DIR", str(tmp_path), "MODEL.WEIGHTS", str(tmp_path / "nowhere.pth"))
    for resume in (False, True):
        with pytest.raises(UserError, match="MODEL.WEIGHTS = .*nowhere.pth"):
            check_run(cfg, resume=resume)


@pytest.mark.parametrize("left", ["last_checkpoint", "model_0000004.pth", "model_final.pth"])
def test_weights_are_not_needed_where_a_checkpoint_is_resumed(tmp_path, left):
    (tmp_path / left).write_text("x")
    cfg = config("OUTPUT_DIR", str(tmp_path), "MODEL.WEIGHTS", str(tmp_path / "nowhere.pth"))
    check_run(cfg, resume=True)
    with pytest.raises(UserError, match="MODEL.WEIGHTS"):
        check_run(cfg, resume=False)


def test_a_mistake_is_found_in_the_order_of_what_it_costs(tmp_path):
    """A wrong key before data sets are read, data sets before weights."""
    cfg = config("DATASETS.TRAIN", "('nothing',)", "MODEL.WEIGHTS", str(tmp_path / "nowhere.pth"), "SOLVER.MAX_ITER", "0")
    for fixed, message in ((("SOLVER.MAX_ITER", 1), "MAX_ITER"), (("DATASETS.TRAIN", ("d2amp_shapes_train",)), "DATASETS.TRAIN")):
        with pytest.raises(UserError, match=message):
            check_run(cfg)
        cfg.merge_from_list([*fixed])
    with pytest.raises(UserError, match="MODEL.WEIGHTS"):
        check_run(cfg)


# OUTPUT_DIR


@pytest.mark.parametrize("name", ["new", "new/deeper/still", "there", "there/new"])
def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path, name):
    (tmp_path / "there").mkdir()
    before = sorted(os.walk(tmp_path))
    check_output(str(tmp_path / name))
    assert sorted(os.walk(tmp_path)) == before


def test_relative_folders_and_remote_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_output("output")
    check_output("")
    check_output("manifold://bucket/output")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["file", "file/output", "file/deeper/output"])
def test_a_file_in_the_way(tmp_path, name):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=f"OUTPUT_DIR = '.*{name}' cannot be written.*file"):
        check_output(str(tmp_path / name))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot be written"):
        check_output(str(tmp_path / "output"))


def test_a_disk_that_takes_nothing(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(UserError, match="No space left on device"):
        check_output(str(tmp_path))


@pytest.mark.parametrize("name", ["log.txt", "metrics.json", "config.yaml", "config_stock.yaml", "last_checkpoint"])
def test_files_of_the_run_that_cannot_be_written(tmp_path, name):
    """Found: a run whose log cannot be opened ended with a traceback, after data sets were made."""
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=f"OUTPUT_DIR.*{name}"):
        check_output(str(tmp_path))


def test_files_of_an_earlier_run_are_not_touched(tmp_path):
    for name in ("log.txt", "metrics.json", "last_checkpoint"):
        (tmp_path / name).write_text("before")
        os.utime(tmp_path / name, (1e9, 1e9))
    check_output(str(tmp_path))
    for name in ("log.txt", "metrics.json", "last_checkpoint"):
        assert (tmp_path / name).read_text() == "before" and (tmp_path / name).stat().st_mtime == 1e9


def test_checks_do_not_draw_random_numbers():
    state = torch.get_rng_state()
    check_run(config())
    assert torch.equal(torch.get_rng_state(), state)
