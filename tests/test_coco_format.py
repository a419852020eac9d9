import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from dataset_checks import forget, score_ground_truth
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.detection_utils import read_image
from PIL import Image

from d2amp_ext.data import coco_format
from d2amp_ext.errors import UserError

CLASSES = ("square", "bar")
SQUARE = [4, 4, 12, 4, 12, 12, 4, 12]
BAR = [[20, 2, 24, 2, 24, 10, 20, 10], [20, 14, 24, 14, 24, 20, 20, 20]]  # one object in two parts


def make_splits(grey=100):
    image = np.full((24, 32), grey, np.uint8)
    image[4:12, 4:12] = 200
    colour = np.stack([image, image // 2, image * 0], axis=-1)
    objects = [coco_format.Instance(0, [SQUARE]), coco_format.Instance(1, BAR)]
    return {
        "train": [
            coco_format.Picture("grey.png", image, objects),
            coco_format.Picture("empty.png", image, []),
            coco_format.Picture("colour.png", colour, objects[:1]),
        ],
        "val": [coco_format.Picture("only.png", image, objects)],
    }


def write(folder, version=1, make=make_splits):
    return coco_format.write_once(folder, version, CLASSES, make)


def never():
    raise AssertionError("the set was made again")


@pytest.fixture
def registered():
    names = ["d2amp_test_a"]
    yield names[0]
    forget(*names)


def test_what_is_written_is_what_detectron2_loads(tmp_path, registered):
    folder = write(tmp_path / "set")
    json_file, image_root = coco_format.split_paths(folder, "train")
    coco_format.register_coco(registered, json_file, image_root, {1: "square", 2: "bar"})
    records = DatasetCatalog.get(registered)
    assert [os.path.basename(r["file_name"]) for r in records] == ["grey.png", "empty.png", "colour.png"]
    assert {(r["height"], r["width"]) for r in records} == {(24, 32)}
    assert [len(r["annotations"]) for r in records] == [2, 0, 1]
    square, bar = records[0]["annotations"]
    assert (square["category_id"], square["bbox"], square["segmentation"]) == (0, [4, 4, 8, 8], [SQUARE])
    assert (bar["category_id"], bar["bbox"], bar["segmentation"]) == (1, [20, 2, 4, 18], BAR)
    areas = [a["area"] for a in json.loads(Path(json_file).read_text())["annotations"]]
    assert areas == [64, 4 * 8 + 4 * 6, 64]
    assert read_image(records[2]["file_name"], "RGB")[5, 5].tolist() == [200, 100, 0]
    assert MetadataCatalog.get(registered).thing_classes == list(CLASSES)


def test_ground_truth_scores_100_and_moved_ground_truth_does_not(tmp_path, registered):
    paths = coco_format.split_paths(write(tmp_path / "set"), "train")
    coco_format.register_coco(registered, *paths, {1: "square", 2: "bar"})
    scores = score_ground_truth(registered, tmp_path / "out")
    assert scores["bbox"]["AP"] == pytest.approx(100) and scores["segm"]["AP"] == pytest.approx(100)
    moved = score_ground_truth(registered, tmp_path / "out2", shift=2)
    assert moved["bbox"]["AP"] < 60 and moved["segm"]["AP"] < 60


def test_a_finished_set_is_not_made_again(tmp_path):
    folder = write(tmp_path / "set")
    assert write(folder, make=never) == folder
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.endswith(".lock")) == ["set"]


@pytest.mark.parametrize("lost", ["d2amp.json", "annotations/val.json", "train/grey.png", "val"])
def test_a_damaged_set_is_made_again(tmp_path, lost):
    folder = write(tmp_path / "set")
    path = folder / lost
    if path.is_dir():
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    else:
        path.unlink()
    assert not coco_format.is_complete(folder, 1)
    write(folder)
    assert coco_format.is_complete(folder, 1) and (folder / lost).exists()


def test_another_version_replaces_the_old_one(tmp_path):
    folder = write(tmp_path / "set")
    write(folder, version=2, make=lambda: make_splits(grey=50))
    assert np.asarray(Image.open(folder / "train" / "empty.png"))[0, 0] == 50
    assert not coco_format.is_complete(folder, 1)


def test_a_foreign_folder_of_that_name_is_kept_aside(tmp_path, caplog):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "mine.txt").write_text("precious")
    write(tmp_path / "set")
    assert coco_format.is_complete(tmp_path / "set", 1)
    (aside,) = tmp_path.glob("set.old-*")
    assert (aside / "mine.txt").read_text() == "precious"
    assert str(aside) in caplog.text


def test_a_failing_maker_leaves_nothing(tmp_path):
    def fail():
        yield make_splits()["train"][0]
        raise UserError("no network")

    with pytest.raises(UserError, match="no network"):
        write(tmp_path / "set", make=lambda: {"train": fail()})
    assert [p.name for p in tmp_path.iterdir()] == [".set.lock"]


def test_a_place_that_cannot_be_written_is_the_users_to_change(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the data set .*DETECTRON2_DATASETS"):
        write(tmp_path / "file" / "set")


CHILD = textwrap.dedent("""
    import sys, time
    sys.path.insert(0, sys.argv[1])
    from pathlib import Path
    from d2amp_ext.data import coco_format
    import numpy as np

    def pictures():
        with open(sys.argv[3], "a") as log:
            log.write("made\\n")
        for i in range(int(sys.argv[4])):
            yield coco_format.Picture(f"{i}.png", np.zeros((8, 8), np.uint8), [])
            time.sleep(0.05)

    coco_format.write_once(Path(sys.argv[2]), 1, ("thing",), lambda: {"train": pictures()})
    """)


def child(folder, log, count):
    root = str(Path(coco_format.__file__).parents[2])
    return subprocess.Popen([sys.executable, "-c", CHILD, root, str(folder), str(log), str(count)])


def test_processes_at_once_make_it_once(tmp_path):
    children = [child(tmp_path / "set", tmp_path / "log", 20) for _ in range(3)]
    assert [c.wait(timeout=60) for c in children] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "made\n"
    assert coco_format.is_complete(tmp_path / "set", 1)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_a_preparation_killed_half_way_is_redone(tmp_path):
    killed = child(tmp_path / "set", tmp_path / "log", 10_000)
    while not list(tmp_path.glob(".set.tmp-*/train/3.png")):
        assert killed.poll() is None
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "set").exists()
    write(tmp_path / "set")
    assert coco_format.is_complete(tmp_path / "set", 1)
    assert not list(tmp_path.glob(".set.tmp-*")), "the remains of the killed process are still there"


def test_registering_reads_nothing_and_loading_prepares(tmp_path, registered):
    folder = tmp_path / "set"
    json_file, image_root = coco_format.split_paths(folder, "val")
    calls = []

    def prepare():
        calls.append(write(folder))

    for _ in range(2):
        coco_format.register_coco(registered, json_file, image_root, {1: "square", 2: "bar"}, prepare, colour="red")
    metadata = MetadataCatalog.get(registered)
    assert (metadata.evaluator_type, metadata.json_file, metadata.image_root) == ("coco", json_file, image_root)
    assert metadata.thing_dataset_id_to_contiguous_id == {1: 0, 2: 1} and metadata.colour == "red"
    assert not calls and not folder.exists()
    assert len(DatasetCatalog.get(registered)) == 1 and len(calls) == 1


def test_the_root_is_detectron2s(monkeypatch, tmp_path):
    monkeypatch.delenv("DETECTRON2_DATASETS", raising=False)
    monkeypatch.chdir(tmp_path)
    assert coco_format.dataset_root() == tmp_path / "datasets"
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path / "elsewhere"))
    assert coco_format.dataset_root() == tmp_path / "elsewhere"
    assert coco_format.dataset_root(tmp_path / "given") == tmp_path / "given"
