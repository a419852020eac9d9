import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as coco_mask
from test_predictor import data_folder, micro, run_dir, weights  # noqa: F401  fixtures

from d2amp_ext import cli
from d2amp_ext.commands.predict import find_images, output_paths, split_overrides


def save(path, seed=0, width=64, height=48):
    """A grey picture with a bright rectangle."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(40, 60, (height, width, 3), dtype=np.uint8)
    pixels[10:30, 15:45] = 220
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def predict(capsys):
    """Runs the command in this process; returns (exit status, stdout, stderr)."""

    def run(*args):
        status = cli.main(["predict", *map(str, args)])
        return status, *capsys.readouterr()

    return run


# From end to end


def test_pictures_and_json_of_a_trained_model(run_dir, run_tool, datasets_dir, tmp_path):  # noqa: F811
    shapes = sorted(datasets_dir.glob("d2amp_shapes/**/val_*.png"))
    first, second, third = tmp_path / "images" / "b.png", tmp_path / "images" / "a.jpg", tmp_path / "more" / "b.png"
    for source, image in zip(shapes, (first, second, third)):
        image.parent.mkdir(exist_ok=True)
        Image.open(source).save(image)
    broken = tmp_path / "images" / "broken.png"
    broken.write_bytes(first.read_bytes()[:200])
    (tmp_path / "images" / "notes.txt").write_text("not an image")
    before = {path: path.read_bytes() for path in (first, second, third)}
    done = run_tool(
        "d2amp_ext.cli", "predict", "images", "more/*.png", "--config-file", run_dir / "config.yaml",
        "--output", "out", "--confidence", "0", "--json",
        "TEST.AMP.ENABLED", "True", "TEST.AMP.PRECISION", "bf16", "MODEL.DEVICE", "cpu",
        cwd=tmp_path, check=1,
    )  # fmt: skip
    summary = json.loads(done.stdout)
    assert [(entry["image"], entry["output"]) for entry in summary["images"]] == [
        (str(Path("images", "a.jpg")), str(Path("out", "a.png"))),
        (str(Path("images", "b.png")), str(Path("out", "b.png"))),
        (str(Path("more", "b.png")), str(Path("out", "b_2.png"))),
    ]
    assert [entry["image"] for entry in summary["skipped"]] == [str(Path("images", "broken.png"))]
    assert "images/broken.png is skipped, it cannot be read" in done.stderr.replace("\\", "/")
    assert "[1/4] " in done.stderr and "\r" not in done.stderr  # plain where there is no terminal
    assert summary["precision"] == "bf16" and summary["device"] == "cpu"
    assert Path(summary["weights"]) == run_dir / "model_final.pth"  # not what the run started from

    assert {path: path.read_bytes() for path in before} == before
    for entry in summary["images"]:
        with Image.open(tmp_path / entry["image"]) as image, Image.open(tmp_path / entry["output"]) as drawn:
            assert drawn.format == "PNG" and drawn.size == image.size
            assert (np.asarray(drawn.convert("RGB")) != np.asarray(image.convert("RGB"))).any()

    predictions = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert len(predictions) == sum(entry["objects"] for entry in summary["images"]) > 0
    for entry in predictions:
        with Image.open(tmp_path / entry["image"]) as image:
            width, height = image.size
        x, y, w, h = entry["bbox"]
        assert 0 <= x <= x + w <= width + 1e-3 and 0 <= y <= y + h <= height + 1e-3  # sums of rounded numbers
        assert (entry["category_id"], entry["category_name"]) in [(1, "rectangle"), (2, "disc"), (3, "triangle")]
        assert 0 <= entry["score"] <= 1 and coco_mask.decode(entry["segmentation"]).shape == (height, width)


def test_keypoints_are_drawn_and_written(weights, predict, tmp_path):  # noqa: F811
    config = tmp_path / "keypoint.yaml"
    config.write_text(micro("keypoint").dump())
    image = save(tmp_path / "a.png")
    status, stdout, _ = predict(
        image, "--output", tmp_path / "out", "--config-file", config, "--weights", weights("keypoint"),
        "--confidence", "0.2", "TEST.AMP.ENABLED", "True", "TEST.AMP.PRECISION", "bf16",
    )  # fmt: skip
    assert status == 0 and "1 image(s), 20 object(s)" in stdout and str(tmp_path / "out") in stdout
    predictions = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert all(len(entry["keypoints"]) == 9 and entry["score"] >= 0.2 for entry in predictions)
    assert (np.asarray(Image.open(tmp_path / "out" / "a.png")) != np.asarray(Image.open(image))).any()


def test_a_panoptic_model(weights, predict, tmp_path):  # noqa: F811
    config = tmp_path / "panoptic.yaml"
    config.write_text(micro("panoptic").dump())
    args = ["--output", tmp_path, "--config-file", config, "--weights", weights("panoptic"), "--confidence", "0.29"]
    small = ["MODEL.PANOPTIC_FPN.COMBINE.STUFF_AREA_LIMIT", "10"]
    status, _, _ = predict(save(tmp_path / "images" / "a.png"), *args, *small)
    assert status == 0 and (tmp_path / "a.png").is_file()
    kinds = {"score" in entry for entry in json.loads((tmp_path / "predictions.json").read_text())}
    assert kinds == {True, False}  # things and stuff


def test_nothing_above_the_confidence_is_explained(weights, predict, tmp_path):  # noqa: F811
    args = ["--output", tmp_path / "out", "--config-file", "quick/faster_rcnn_micro.yaml", "--weights", weights("box")]
    status, stdout, _ = predict(save(tmp_path / "a.png"), *args, "--confidence", "0.99", "--opts", "SEED", "1")
    assert status == 0 and "0 object(s)" in stdout
    assert "The highest score was 0." in stdout and "--confidence 0.99 leaves it out" in stdout
    assert json.loads((tmp_path / "out" / "predictions.json").read_text()) == []


def test_tta_in_16_bit(weights, predict, tmp_path):  # noqa: F811
    args = ["--output", tmp_path / "out", "--config-file", "quick/mask_rcnn_micro.yaml", "--weights", weights("mask")]
    tta = ["TEST.AUG.ENABLED", "True", "TEST.AUG.MIN_SIZES", "(40, 48)", "TEST.AUG.MAX_SIZE", "64"]
    status, stdout, _ = predict(save(tmp_path / "a.png"), *args, "--json", "--confidence", "0", "TEST.AMP.ENABLED",
                                "True", "TEST.AMP.PRECISION", "bf16", *tta)  # fmt: skip
    assert status == 0 and json.loads(stdout)["images"][0]["objects"] > 0
    status, _, stderr = predict(tmp_path / "a.png", "--output", tmp_path / "out", "--config-file",
                                "quick/retinanet_micro.yaml", "--weights", weights("retinanet"), *tta)  # fmt: skip
    assert status == 2 and "TEST.AUG.ENABLED" in stderr and "RetinaNet" in stderr


def test_what_was_done_before_a_failure_is_kept(weights, predict, tmp_path, monkeypatch):  # noqa: F811
    from d2amp_ext import Predictor

    stock, calls = Predictor.__call__, []

    def fail_at_the_second(self, image):
        calls.append(image)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return stock(self, image)

    monkeypatch.setattr(Predictor, "__call__", fail_at_the_second)
    images = [save(tmp_path / "a.png"), save(tmp_path / "b.png")]
    args = ["--output", tmp_path / "out", "--config-file", "quick/faster_rcnn_micro.yaml", "--weights", weights("box")]
    status, _, _ = predict(*images, *args, "--confidence", "0")
    assert status == 130
    predictions = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert {entry["image"] for entry in predictions} == {str(images[0])} and (tmp_path / "out" / "a.png").is_file()


# Which weights


def test_a_run_folder_gives_its_last_checkpoint_unless_weights_are_named(run_dir, predict, tmp_path):  # noqa: F811
    copy = tmp_path / "run"
    copy.mkdir()
    shutil.copy(run_dir / "config.yaml", copy)
    args = [save(tmp_path / "a.png"), "--config-file", copy / "config.yaml", "--output", tmp_path / "out", "--json"]
    status, _, stderr = predict(*args)  # the run started from random weights
    assert status == 2 and 'MODEL.WEIGHTS is ""' in stderr and "--weights FILE" in stderr

    shutil.copy(run_dir / "model_final.pth", copy / "model_0000003.pth")
    shutil.copy(run_dir / "last_checkpoint", copy)  # names a file that is not there
    status, stdout, _ = predict(*args)
    assert status == 0 and json.loads(stdout)["weights"] == str(copy / "model_0000003.pth")
    final = run_dir / "model_final.pth"
    for named in (["--weights", final], ["MODEL.WEIGHTS", final]):
        status, stdout, _ = predict(*args, *named)
        assert status == 0 and json.loads(stdout)["weights"] == str(final)


def test_hostile_weights_are_refused_and_trusted_ones_read(weights, predict, tmp_path):  # noqa: F811
    mark, path = tmp_path / "mark", tmp_path / "hostile.pkl"

    class Hostile:
        def __reduce__(self):
            return open, (str(mark), "w")

    state = {name: value.numpy() for name, value in torch.load(weights("box"), weights_only=True)["model"].items()}
    path.write_bytes(pickle.dumps({"model": state, "__author__": "x", "more": Hostile()}))
    args = [save(tmp_path / "a.png"), "--config-file", "quick/faster_rcnn_micro.yaml", "--output", tmp_path / "out"]
    status, _, stderr = predict(*args, "--weights", path)
    assert status == 2 and "hostile.pkl" in stderr and "--trust" in stderr and not mark.exists()
    assert not list((tmp_path / "out").iterdir())
    status, _, _ = predict(*args, "--weights", path, "--trust")
    assert status == 0 and mark.exists()


# Mistakes


@pytest.mark.parametrize(
    "args, named",
    [
        (["nothing.png"], "no image to predict: nothing.png"),
        (["empty"], "no image to predict: empty"),
        (["*.jpg"], "no image to predict: *.jpg"),
        (["MODEL.DEVICE", "cpu"], "no image to predict: none was named"),
        (["a.png", "MODEL.DEVISE", "cpu"], "Did you mean MODEL.DEVICE?"),
        (["a.png", "MODEL.DEVICE"], "has no partner"),
        (["a.png", "TEST.AMP.PRECISION", "bf15"], "TEST.AMP.PRECISION = 'bf15'"),
        (["a.png", "--confidence", "1.5"], "--confidence 1.5: must lie between 0 and 1"),
        (["a.png", "--weights", "gone.pth"], "MODEL.WEIGHTS = 'gone.pth'"),
        (["a.png", "--weights", "a.png", "--output", "a.png"], "--output a.png cannot be written"),
        (["a.png", "--config-file", "gone.yaml"], "gone.yaml does not exist"),
        (["a.png", "--config-file", "quick/mask_rcnn_mikro.yaml"], "Did you mean quick/mask_rcnn_micro.yaml"),
        (["a.png", "--weights", "a.png"], "a.png is damaged"),
    ],
)
def test_mistakes_end_with_status_2(args, named, predict, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(Path("a.png"))
    Path("empty").mkdir()
    defaults = ["--config-file", "quick/faster_rcnn_micro.yaml", "--output", "out"]
    status, stdout, stderr = predict(*defaults, *args)
    assert status == 2 and stdout == "" and "Traceback" not in stderr
    assert named in stderr.splitlines()[-1]


@pytest.mark.parametrize("missing", ["--config-file", "--output", "IMAGE"])
def test_required_arguments(missing, predict):
    given = {"--config-file": ["--config-file", "x.yaml"], "--output": ["--output", "out"], "IMAGE": ["a.png"]}
    status, _, stderr = predict(*(part for name, parts in given.items() if name != missing for part in parts))
    assert status == 2 and "required" in stderr and missing in stderr


def test_a_missing_image_among_others_is_named_and_makes_status_1(weights, predict, tmp_path):  # noqa: F811
    args = ["--config-file", "quick/faster_rcnn_micro.yaml", "--output", tmp_path / "out", "--weights", weights("box")]
    status, stdout, stderr = predict(save(tmp_path / "a.png"), tmp_path / "gone.png", *args)
    assert status == 1 and (tmp_path / "out" / "a.png").is_file()
    assert "gone.png is skipped: there is no such image" in stderr and "Skipped: " in stdout


def test_help_shows_examples(predict):
    status, stdout, _ = predict("--help")
    assert status == 0 and "d2amp predict photo.jpg --config-file output/config.yaml" in stdout
    assert "TEST.AMP.PRECISION bf16" in stdout


# The parts


def test_overrides_start_at_the_first_key_that_is_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("TEST.AMP").touch()
    assert split_overrides(["a.png", "MODEL.DEVICE", "cpu"]) == (["a.png"], ["MODEL.DEVICE", "cpu"])
    assert split_overrides(["a.png", "SEED", "1"]) == (["a.png"], ["SEED", "1"])
    assert split_overrides(["DSC01.JPG", "FOLDER", "TEST.AMP"]) == (["DSC01.JPG", "FOLDER", "TEST.AMP"], [])
    assert split_overrides(["a", "MODLE.MASK_ON", "b.png"]) == (["a"], ["MODLE.MASK_ON", "b.png"])


def test_images_of_files_folders_and_patterns(tmp_path):
    names = ["c.png", "B.JPG", "a.tiff", ".hidden.png", "notes.txt", "sub/d.png"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "folder.png").mkdir()
    images, problems = find_images([str(tmp_path)])
    assert [path.name for path in images] == ["B.JPG", "a.tiff", "c.png"] and problems == {}
    # A file that is named is taken, whatever its suffix; each file once.
    images, _ = find_images([str(tmp_path / "notes.txt"), str(tmp_path / "sub" / ".." / "c.png"), str(tmp_path)])
    assert [path.name for path in images] == ["notes.txt", "c.png", "B.JPG", "a.tiff"]
    images, _ = find_images([str(tmp_path / "**" / "*")])
    assert [path.name for path in images] == ["B.JPG", "a.tiff", "c.png", "d.png"]
    images, problems = find_images([str(tmp_path / "x*.png"), str(tmp_path / "folder.png"), "gone.png"])
    assert images == []
    no_image, empty = "there is no such image", "there is no image in this folder"
    assert list(problems.values()) == [no_image, empty, no_image]


def test_outputs_are_distinct_and_never_an_input(tmp_path):
    images = [save(tmp_path / name) for name in ("a.png", "a_2.png", "sub/a.png", "sub/a.jpg", "B.jpg", "sub/b.jpg")]
    names = [path.name for path in output_paths(images, tmp_path)]
    assert names == ["a_3.png", "a_2_2.png", "a_4.png", "a_5.png", "B.png", "b_2.png"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "B.png").symlink_to(images[4])  # writing there would write the input
    names = [path.name for path in output_paths(images, tmp_path / "out")]
    assert names == ["a.png", "a_2.png", "a_3.png", "a_4.png", "B_2.png", "b.png"]


def test_the_progress_bar_is_for_terminals(weights, predict, tmp_path, monkeypatch):  # noqa: F811
    args = ["--config-file", "quick/faster_rcnn_micro.yaml", "--output", tmp_path / "out", "--weights", weights("box")]
    image = save(tmp_path / "a.png")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    status, _, stderr = predict(image, *args)
    assert status == 0 and "1/1" in stderr and "\r" in stderr and f"[1/1] {image}" not in stderr
