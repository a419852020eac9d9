import json
import logging
import os

import numpy as np
import pytest
import torch
from dataset_checks import forget, mask_cfg
from detectron2.config import get_cfg
from detectron2.data import DatasetCatalog, MetadataCatalog, build_detection_train_loader
from detectron2.evaluation import PascalVOCDetectionEvaluator
from detectron2.structures import Boxes, Instances
from PIL import Image

from d2amp_ext.data import coco_format, nuclei, shapes
from d2amp_ext.data.readers import PASCAL_CLASSES
from d2amp_ext.data.register import check_datasets, register_datasets
from d2amp_ext.errors import UserError

NAMES = ("mine_train", "mine_val", "mine_other")


@pytest.fixture(autouse=True)
def clean():
    yield
    forget(*NAMES, *nuclei.NAMES, *shapes.NAMES)


def make_cfg(*entries, train=(), test=(), opts=()):
    """A cfg as `add_amp_config` makes it, as far as data sets go."""
    cfg = get_cfg()
    cfg.DATASETS.REGISTER = tuple(entries)
    cfg.merge_from_list(["DATASETS.TRAIN", tuple(train), "DATASETS.TEST", tuple(test), *opts])
    return cfg


def register(*entries):
    register_datasets(make_cfg(*entries))


def coco_content():
    return {
        "images": [{"id": i, "file_name": f"{i}.png", "height": 20, "width": 30} for i in (1, 2, 3)],
        # ids out of order and with gaps, as people have them
        "categories": [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}],
        "annotations": [
            {"id": 1, "image_id": 1, "category_id": 7, "bbox": [2, 2, 9, 9], "iscrowd": 0, "area": 81},
            {"id": 2, "image_id": 3, "category_id": 3, "bbox": [5, 5, 9, 9], "iscrowd": 0, "area": 81},
        ],
    }


@pytest.fixture
def coco(tmp_path):
    """Writes a small COCO set, image 2 without a box; returns a function (changes) -> entry."""
    (tmp_path / "images").mkdir()
    for i in (1, 2, 3):
        Image.fromarray(np.full((20, 30, 3), 40 * i, np.uint8)).save(tmp_path / "images" / f"{i}.png")

    def write(name="mine_train", content=None):
        (tmp_path / f"{name}.json").write_text(json.dumps(coco_content() if content is None else content))
        return f"{name}=coco:{tmp_path / f'{name}.json'}:{tmp_path / 'images'}"

    return write


OBJECT = (
    "<object><name>{}</name>{}<bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object>"
)
TAGS = "<pose>Unspecified</pose><truncated>0</truncated><difficult>0</difficult>"


def voc_object(name, box=(1, 1, 10, 10), tags=TAGS):
    return OBJECT.format(name, tags, *box)


def write_voc(folder, images, splits, suffix=".jpg", size=True):
    """A VOC folder: images {id: XML of the objects}, splits {name: ids}; pictures are 30 x 20."""
    for part in ("Annotations", "ImageSets/Main", "JPEGImages"):
        (folder / part).mkdir(parents=True)
    text = "<size><width>30</width><height>20</height><depth>3</depth></size>" if size else ""
    for image_id, objects in images.items():
        (folder / "Annotations" / f"{image_id}.xml").write_text(f"<annotation>{text}{objects}</annotation>")
        Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(folder / "JPEGImages" / f"{image_id}{suffix}")
    for split, ids in splits.items():
        (folder / "ImageSets" / "Main" / f"{split}.txt").write_text("".join(f"{i}\n" for i in ids))
    return folder


# --- COCO


def test_coco_names_are_known_at_once_and_the_set_loads(coco):
    register(coco())
    metadata = MetadataCatalog.get("mine_train")
    assert metadata.thing_classes == ["cat", "dog"], "not in the order of category ids"
    assert metadata.evaluator_type == "coco"
    records = DatasetCatalog.get("mine_train")
    assert [[a["category_id"] for a in r["annotations"]] for r in records] == [[1], [], [0]]
    assert all(os.path.isfile(r["file_name"]) for r in records)


@pytest.mark.parametrize("filter_empty, expected", [(True, {1, 3}), (False, {1, 2, 3})])
def test_a_boxless_image_is_kept_or_dropped_as_the_cfg_says(coco, filter_empty, expected):
    register(coco())
    opts = ["DATASETS.TRAIN", ("mine_train",), "DATALOADER.FILTER_EMPTY_ANNOTATIONS", filter_empty]
    cfg = mask_cfg(*opts, "SOLVER.IMS_PER_BATCH", 1, "MODEL.MASK_ON", False, "INPUT.MIN_SIZE_TRAIN", (20,))
    loader = iter(build_detection_train_loader(cfg))
    assert {next(loader)[0]["image_id"] for _ in range(6)} == expected


def test_relative_paths_home_and_variables_are_expanded(coco, tmp_path, monkeypatch):
    coco()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("MY_IMAGES", str(tmp_path / "images"))
    register("mine_train=coco:mine_train.json:./images", "mine_val = COCO: ~/mine_train.json : $MY_IMAGES")
    for name in NAMES[:2]:
        metadata = MetadataCatalog.get(name)
        assert metadata.json_file == str(tmp_path / "mine_train.json")
        assert metadata.image_root == str(tmp_path / "images")


def test_the_same_entry_again_is_fine_and_another_is_not(coco, tmp_path):
    entry = coco()
    register(entry, entry)
    register(entry)
    with pytest.raises(UserError, match="mine_train' is registered already, as mine_train=coco:.*Choose another name"):
        register(coco("mine_val").replace("mine_val=", "mine_train="))
    assert MetadataCatalog.get("mine_train").json_file == str(tmp_path / "mine_train.json")


@pytest.mark.parametrize("name, why", [("coco_2017_val", "by Detectron2"), ("d2amp_shapes_train", "sample data set")])
def test_names_of_others_are_refused(coco, name, why):
    with pytest.raises(UserError, match=f"{name}.*{why}.*Choose another name"):
        register(coco().replace("mine_train=", f"{name}=", 1))


def changed(**changes):
    content = coco_content()
    for key, value in changes.items():
        if value is None:
            del content[key]
        elif isinstance(value, dict):
            content[key][0].update(value)
        else:
            content[key] = value
    return content


@pytest.mark.parametrize(
    "content, problem",
    [
        ([], "holds a list"),
        ({"shapes": []}, "no list images"),
        (changed(categories=None), "no list categories"),
        (changed(categories=[]), "no class"),
        (changed(images=[]), "images is empty"),
        (changed(images=[1]), "entries are not objects"),
        (changed(images=[{"id": 1, "file_name": "1.png", "width": 3}]), "lacks 'height'"),
        (changed(images={"id": 2}), "two images have the same id"),
        (changed(categories={"id": 3}), "two categories have the same id"),
        (changed(annotations={"id": 2}), "two annotations have the same id"),
        (changed(annotations={"category_id": 9}), "annotation 1 has the category_id 9"),
        (changed(annotations={"bbox": []}), r"annotation 1 has the bbox \[\]"),
        (changed(annotations={"ignore": 1}), "annotation 1 has ignore"),
        (changed(annotations=[{"segments_info": [], "image_id": 1}]), "panoptic"),
    ],
)
def test_a_file_that_is_no_coco_file_is_named_with_the_reason(coco, content, problem):
    entry = coco(content=content)
    with pytest.raises(UserError) as raised:
        register(entry)
    message = str(raised.value)
    assert message.startswith(f"DATASETS.REGISTER has {entry!r}: ") and "is not a COCO instances file" in message
    assert raised.match(problem)
    assert "mine_train" not in DatasetCatalog, "half a registration is left"


def test_a_coco_file_without_annotations_is_for_tests(coco):
    register(coco(content=changed(annotations=None)))
    assert [len(r["annotations"]) for r in DatasetCatalog.get("mine_train")] == [0, 0, 0]


def test_missing_and_torn_coco_files(coco, tmp_path):
    entry = coco()
    with pytest.raises(UserError, match="DATASETS.REGISTER has .*no such.json cannot be read: No such file"):
        register(entry.replace("mine_train.json", "no such.json"))
    with pytest.raises(UserError, match="no image folder .*pictures. Check the path"):
        register(entry.replace("images", "pictures"))
    (tmp_path / "mine_train.json").write_text(json.dumps(coco_content())[:100])
    with pytest.raises(UserError, match="does not parse as JSON: .*copy it again"):
        register(entry)


@pytest.mark.parametrize(
    "entry",
    [
        "",
        "coco:a.json:images",
        "mine_train=a.json:images",
        "mine_train=coco:a.json",
        "mine_train=coco::images",
        "mine_train=coco:a.json:images:more",
        "mine_train=yolo:a.json:images",
        "mine_train=voc:VOC2007",
        "mine_train=voc:C:\\VOC2007",
        "mine_train=voc:VOC2007:ImageSets/Main/train",
    ],
)
def test_a_malformed_entry_shows_both_forms(entry):
    with pytest.raises(UserError) as raised:
        register(entry)
    message = str(raised.value)
    assert message.startswith(f"DATASETS.REGISTER has {entry!r}: ")
    assert "name=coco:ANNOTATIONS.json:IMAGE_DIR" in message and "name=voc:DIR:SPLIT" in message


def test_windows_drives_are_no_separators(monkeypatch):
    from d2amp_ext.data.specs import parse_spec

    monkeypatch.setattr(os.path, "isdir", lambda path: True)
    both = parse_spec(r"mine_train=coco:C:\data\a.json:D:\images")
    assert (both.path, both.rest) == (r"C:\data\a.json", r"D:\images")
    assert parse_spec("mine_train=coco:C:/data/a.json:D:/images").rest == "D:/images"
    assert parse_spec("mine_train=coco:s3://bucket/a.json:s3://bucket/images").path == "s3://bucket/a.json"
    voc = parse_spec(r"mine_train=voc:C:\VOC2007:trainval")
    assert (voc.path, voc.rest) == (r"C:\VOC2007", "trainval")
    with pytest.raises(UserError, match=r"C:\\data\\a.json cannot be read"):
        register(r"mine_train=coco:C:\data\a.json:D:\images")


# --- VOC


def test_voc_with_names_of_its_own(tmp_path):
    images = {"b": voc_object("wolf") + voc_object("lynx", (3, 5, 30, 20)), "a": voc_object("bear"), "c": ""}
    folder = write_voc(tmp_path / "beasts", images, {"train": ["b", "c"], "val": ["a"]})
    register(f"mine_train=voc:{folder}:train", f"mine_val=voc:{folder}:val")
    for name, split in (("mine_train", "train"), ("mine_val", "val")):
        metadata = MetadataCatalog.get(name)
        assert metadata.thing_classes == ["bear", "lynx", "wolf"], "the splits of a folder must agree"
        assert (metadata.evaluator_type, metadata.year) == ("pascal_voc", 2012)
        assert (metadata.dirname, metadata.split) == (str(folder), split)
    records = DatasetCatalog.get("mine_train")
    assert [(r["image_id"], r["height"], r["width"]) for r in records] == [("b", 20, 30), ("c", 20, 30)]
    boxes = [(a["category_id"], a["bbox"]) for a in records[0]["annotations"]]
    assert boxes == [(2, [0, 0, 10, 10]), (1, [2, 4, 30, 20])]


def test_voc_like_folders_with_png_and_without_size(tmp_path):
    folder = write_voc(tmp_path / "v", {"only": voc_object("wolf")}, {"all": ["only"]}, suffix=".PNG", size=False)
    register(f"mine_train=voc:{folder}:all")
    (record,) = DatasetCatalog.get("mine_train")
    assert (record["height"], record["width"]) == (20, 30) and record["file_name"].endswith("only.PNG")


@pytest.mark.parametrize(
    "folder, names, classes, year",
    [
        ("VOC2007", ["dog", "cat"], PASCAL_CLASSES, 2007),
        ("VOC2012", ["dog"], PASCAL_CLASSES, 2012),
        ("pets", ["person", "aeroplane"], ("aeroplane", "person"), 2012),
        ("pets", ["tvmonitor", "sofa", "bus"], ("bus", "sofa", "tvmonitor"), 2012),
        ("pets2007", ["zebra", "cat"], ("cat", "zebra"), 2007),
    ],
)
def test_pascals_names_keep_pascals_order(tmp_path, folder, names, classes, year):
    path = write_voc(tmp_path / folder, {"1": "".join(map(voc_object, names))}, {"train": ["1"]})
    register(f"mine_train=voc:{path}:train")
    assert tuple(MetadataCatalog.get("mine_train").thing_classes) == classes
    assert MetadataCatalog.get("mine_train").year == year


def test_detectron2s_voc_evaluator_scores_it(tmp_path):
    images = {"1": voc_object("wolf") + voc_object("lynx", (5, 5, 20, 18)), "2": voc_object("wolf", (2, 2, 9, 19))}
    folder = write_voc(tmp_path / "beasts", images, {"val": ["1", "2"]})
    cfg = make_cfg(f"mine_val=voc:{folder}:val", test=["mine_val"], opts=["MODEL.ROI_HEADS.NUM_CLASSES", 2])
    register_datasets(cfg)
    check_datasets(cfg, train=False)
    for shift, expected in ((0, 100), (4, 0)):
        evaluator = PascalVOCDetectionEvaluator("mine_val")
        evaluator.reset()
        for record in DatasetCatalog.get("mine_val"):
            found = Instances((record["height"], record["width"]))
            found.pred_boxes = Boxes(torch.tensor([a["bbox"] for a in record["annotations"]]).float() + shift)
            found.pred_classes = torch.tensor([a["category_id"] for a in record["annotations"]])
            found.scores = torch.ones(len(found))
            evaluator.process([record], [{"instances": found}])
        assert evaluator.evaluate()["bbox"]["AP75"] == pytest.approx(expected)


def remove(path):
    (path / "JPEGImages" / "1.jpg").unlink()
    (path / "JPEGImages").rmdir()


@pytest.mark.parametrize(
    "spoil, problem",
    [
        (lambda p: os.rename(p, p.with_name("moved")), "no folder .*beasts"),
        (remove, "no folder .*JPEGImages"),
        (lambda p: (p / "ImageSets/Main/train.txt").unlink(), "no split 'train'.*Splits there: test"),
        (lambda p: (p / "ImageSets/Main/train.txt").write_text("\n"), "lists no image"),
        (lambda p: (p / "ImageSets/Main/train.txt").write_text("1 -1\n"), "line '1 -1': .*no blanks"),
        (lambda p: (p / "ImageSets/Main/train.txt").write_text("1\n9\n"), "9.xml cannot be read: No such file"),
        (lambda p: (p / "Annotations/1.xml").write_text("<annotation><obj"), "1.xml does not parse as XML"),
        (lambda p: (p / "Annotations/1.xml").write_text("<annotation/>"), "so there is no class"),
        (
            lambda p: (p / "Annotations/1.xml").write_text(f"<annotation>{voc_object('')}</annotation>"),
            "object without a name",
        ),
        (
            lambda p: (p / "Annotations/1.xml").write_text("<a><object><name>wolf</name></object></a>"),
            "without numbers for xmin",
        ),
    ],
)
def test_voc_folders_that_cannot_be_read(tmp_path, spoil, problem):
    folder = write_voc(tmp_path / "beasts", {"1": voc_object("wolf")}, {"train": ["1"], "test": ["1"]})
    spoil(folder)
    with pytest.raises(UserError, match=f"DATASETS.REGISTER has 'mine_train=voc:.*': .*{problem}"):
        register(f"mine_train=voc:{folder}:train")
    assert "mine_train" not in DatasetCatalog


def test_a_missing_voc_image_is_named_when_the_set_is_loaded(tmp_path):
    folder = write_voc(tmp_path / "beasts", {"1": voc_object("wolf")}, {"train": ["1"]})
    (folder / "JPEGImages" / "1.jpg").unlink()
    register(f"mine_train=voc:{folder}:train")
    with pytest.raises(UserError, match="has no image 1 .*train.txt lists"):
        DatasetCatalog.get("mine_train")


@pytest.mark.parametrize(
    "tags, box, problem",
    [
        ("", (1, 1, 9, 9), "truncated is None"),
        ("<truncated>0</truncated><difficult>0</difficult>", (1, 1, 9, 9), "without the tag pose"),
        (TAGS, (1.5, 1, 9, 9), "bndbox/xmin is '1.5', not an integer"),
    ],
)
def test_what_pascals_evaluator_cannot_read_may_train_but_not_test(tmp_path, tags, box, problem):
    folder = write_voc(tmp_path / "v", {"1": voc_object("wolf", box, tags)}, {"train": ["1"]})
    entry, opts = f"mine_train=voc:{folder}:train", ["MODEL.ROI_HEADS.NUM_CLASSES", 1]
    cfg = make_cfg(entry, train=["mine_train"], opts=opts)
    register_datasets(cfg)
    check_datasets(cfg)
    assert len(DatasetCatalog.get("mine_train")) == 1
    with pytest.raises(UserError, match=f"DATASETS.TEST has 'mine_train'.*evaluator cannot read: .*1.xml.*{problem}"):
        check_datasets(make_cfg(entry, train=["mine_train"], test=["mine_train"], opts=opts))


# --- check_datasets


def test_a_cfg_without_our_key_is_fine_and_samples_come_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    cfg = get_cfg()
    register_datasets(cfg)
    assert shapes.NAMES[0] not in DatasetCatalog
    cfg.merge_from_list(["DATASETS.TRAIN", shapes.NAMES[:1], "MODEL.ROI_HEADS.NUM_CLASSES", 3])
    register_datasets(cfg)
    assert shapes.NAMES[0] in DatasetCatalog and nuclei.NAMES[0] not in DatasetCatalog
    assert not (tmp_path / "d2amp_shapes").exists()
    check_datasets(cfg)
    assert (tmp_path / "d2amp_shapes" / "train").is_dir(), "the sample is not made before the model"


def test_samples_that_cannot_be_fetched_fail_the_check(tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    monkeypatch.setenv(nuclei.WHEEL_VARIABLE, str(tmp_path / "absent.whl"))
    cfg = make_cfg(test=nuclei.NAMES[1:], opts=["MODEL.ROI_HEADS.NUM_CLASSES", 1])
    register_datasets(cfg)
    with pytest.raises(UserError, match="absent.whl"):
        check_datasets(cfg, train=False)


@pytest.mark.parametrize(
    "architecture, opts, fits",
    [
        ("GeneralizedRCNN", ["MODEL.ROI_HEADS.NUM_CLASSES", 2], True),
        ("GeneralizedRCNN", ["MODEL.RETINANET.NUM_CLASSES", 2], "MODEL.ROI_HEADS.NUM_CLASSES is 80"),
        ("PanopticFPN", ["MODEL.ROI_HEADS.NUM_CLASSES", 3], "MODEL.ROI_HEADS.NUM_CLASSES is 3"),
        ("TheirGeneralizedRCNN", ["MODEL.ROI_HEADS.NUM_CLASSES", 1], "MODEL.ROI_HEADS.NUM_CLASSES is 1"),
        ("RetinaNet", ["MODEL.RETINANET.NUM_CLASSES", 2], True),
        ("RetinaNet", ["MODEL.ROI_HEADS.NUM_CLASSES", 2], "MODEL.RETINANET.NUM_CLASSES is 80"),
        ("FCOS", ["MODEL.RETINANET.NUM_CLASSES", 1], "MODEL.RETINANET.NUM_CLASSES is 1"),
        ("GeneralizedRCNN", ["MODEL.ROI_HEADS.NUM_CLASSES", 0], "MODEL.ROI_HEADS.NUM_CLASSES is 0"),
        ("ProposalNetwork", [], True),
        ("SemanticSegmentor", [], True),
        ("SomethingElse", [], True),
    ],
)
def test_the_class_count_must_be_the_models(coco, architecture, opts, fits):
    opts = ["MODEL.META_ARCHITECTURE", architecture, *opts]
    cfg = make_cfg(coco(), train=["mine_train"], opts=opts)
    register_datasets(cfg)
    if fits is True:
        check_datasets(cfg)
        return
    with pytest.raises(UserError) as raised:
        check_datasets(cfg)
    key = fits.split()[0]
    assert f"{fits}, but 'mine_train' of DATASETS.TRAIN has 2 classes (cat, dog). Set {key} 2" in str(raised.value)


def test_the_test_set_is_counted_too(coco):
    one = coco_content()
    one["categories"] = one["categories"][:1]
    one["annotations"] = one["annotations"][:1]
    entries = coco(), coco("mine_val", one)
    cfg = make_cfg(*entries, train=["mine_train"], test=["mine_val"], opts=["MODEL.ROI_HEADS.NUM_CLASSES", 2])
    register_datasets(cfg)
    with pytest.raises(UserError, match="'mine_val' of DATASETS.TEST has 1 class .dog.. Set MODEL.ROI_.* 1, or"):
        check_datasets(cfg)


@pytest.mark.parametrize("classes, fails", [(None, None), ([], "no class"), (["a"], "has 1 class")])
def test_sets_of_other_code_are_judged_by_their_metadata(classes, fails):
    DatasetCatalog.register("mine_other", lambda: [])
    if classes is not None:
        MetadataCatalog.get("mine_other").thing_classes = classes
    MetadataCatalog.get("mine_other").json_file = "/no/such/file, which their own loader may not read"
    cfg = make_cfg(train=["mine_other"])
    if fails is None:
        check_datasets(cfg)
    else:
        with pytest.raises(UserError, match=f"mine_other.*{fails}"):
            check_datasets(cfg)


@pytest.mark.parametrize("builtin, model, key", [("coco_2017_train", 81, 80), ("voc_2007_trainval", 80, 20)])
def test_detectron2s_own_sets_are_counted(tmp_path, monkeypatch, builtin, model, key):
    """Counts of Detectron2's own sets are known without their files, so make the files look present."""
    monkeypatch.setattr(os.path, "exists", lambda path: True)
    with pytest.raises(UserError, match=f"is {model}, but '{builtin}' of DATASETS.TRAIN has {key} classes.*, ...."):
        check_datasets(make_cfg(train=[builtin], opts=["MODEL.ROI_HEADS.NUM_CLASSES", model]))
    check_datasets(make_cfg(train=[builtin], opts=["MODEL.ROI_HEADS.NUM_CLASSES", key]))


def test_nothing_to_train_on_or_to_evaluate(coco):
    with pytest.raises(UserError, match="DATASETS.TRAIN is empty, .* train on.*coco_2017_train"):
        check_datasets(make_cfg(test=["coco_2017_val"]))
    with pytest.raises(UserError, match="DATASETS.TEST is empty, .* evaluate.*coco_2017_val"):
        check_datasets(make_cfg(train=["coco_2017_train"]), train=False)
    cfg = make_cfg(coco(), train=["nobody_knows"], test=["mine_train"], opts=["MODEL.ROI_HEADS.NUM_CLASSES", 2])
    register_datasets(cfg)
    check_datasets(cfg, train=False)  # the training set does not matter then


def test_a_name_nobody_registered_gets_its_nearest_matches():
    with pytest.raises(UserError) as raised:
        check_datasets(make_cfg(train=["coco_2017_trian"]))
    message = str(raised.value)
    assert "DATASETS.TRAIN has 'coco_2017_trian', which is not a registered data set" in message
    assert "Did you mean 'coco_2017_train'" in message
    assert 'DATASETS.REGISTER: "coco_2017_trian=coco:ANNOTATIONS.json:IMAGE_DIR"' in message


@pytest.mark.parametrize(
    "name, path",
    [
        ("coco_2017_val", "coco/annotations/instances_val2017.json"),
        ("voc_2007_test", "VOC2007"),
        ("cityscapes_fine_sem_seg_val", "cityscapes/leftImg8bit/val"),
        ("ade20k_sem_seg_val", "ADEChallengeData2016/images/validation"),
    ],
)
def test_missing_files_of_detectron2s_own_sets_are_named(name, path):
    with pytest.raises(UserError) as raised:
        check_datasets(make_cfg(test=[name]), train=False)
    message = str(raised.value).replace(os.sep, "/")
    assert f"DATASETS.TEST has '{name}', but the " in message
    assert f"/{path}" in message and "DETECTRON2_DATASETS" in message


def test_files_of_ours_that_vanished_are_named(coco, tmp_path):
    cfg = make_cfg(coco(), train=["mine_train"], opts=["MODEL.ROI_HEADS.NUM_CLASSES", 2])
    register_datasets(cfg)
    (tmp_path / "images" / "1.png").unlink()
    with pytest.raises(UserError, match="name the image .*1.png, but there is no such file. Mend the IMAGE_DIR"):
        check_datasets(cfg)
    (tmp_path / "mine_train.json").unlink()
    with pytest.raises(UserError, match="the file .*mine_train.json does not exist. Mend its entry in DATASETS.REG"):
        check_datasets(cfg)


def test_sets_trained_on_together_need_the_same_classes(coco, caplog):
    other = coco_content()
    other["categories"][0]["name"] = "wolf"
    entries = coco(), coco("mine_val", other)
    opts = ["MODEL.ROI_HEADS.NUM_CLASSES", 2]
    cfg = make_cfg(*entries, train=["mine_train", "mine_val"], opts=opts)
    register_datasets(cfg)
    with pytest.raises(UserError, match="'mine_val' .*wolf.*'mine_train' .*dog.*same classes in the same order"):
        check_datasets(cfg)
    with caplog.at_level(logging.WARNING):
        check_datasets(make_cfg(*entries, train=["mine_train"], test=["mine_val"], opts=opts))
    assert "class indices are taken to mean the same" in caplog.text


def test_our_own_writer_and_reader_agree(tmp_path):
    folder = shapes.prepare(tmp_path)
    json_file, image_root = coco_format.split_paths(folder, "val")
    entry = f"mine_val=coco:{json_file}:{image_root}"
    cfg = make_cfg(entry, test=["mine_val"], opts=["MODEL.ROI_HEADS.NUM_CLASSES", 3])
    register_datasets(cfg)
    check_datasets(cfg, train=False)
    assert MetadataCatalog.get("mine_val").thing_classes == list(shapes.THING_CLASSES)
