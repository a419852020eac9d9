import os

import pytest

from d2amp_ext import UserError, load_cfg
from d2amp_ext.config_files import find_config, packaged_dir, read_yaml, zoo_dir


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_a_path_comes_first_then_packaged_then_the_zoo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "quick/faster_rcnn_micro.yaml"
    assert find_config(name) == str(packaged_dir() / name)
    zoo = "COCO-Detection/faster_rcnn_R_50_FPN_1x.yaml"
    assert find_config(zoo) == str(zoo_dir() / zoo)
    write(tmp_path, name, "VERSION: 2\n")
    assert os.path.samefile(find_config(name), tmp_path / name)


def test_a_missing_config_names_the_nearest():
    with pytest.raises(UserError, match="Did you mean COCO-Detection/faster_rcnn_R_50_FPN_1x.yaml"):
        find_config("COCO-Detection/faster_rcnn_R50_FPN_1x.yaml")
    with pytest.raises(UserError, match="quick/faster_rcnn_micro.yaml"):
        find_config("faster_rcnn_micr.yaml")
    with pytest.raises(UserError, match="is a folder"):
        find_config(str(packaged_dir()))


def test_a_base_is_a_file_beside_it_a_packaged_one_or_one_of_the_zoo(tmp_path):
    write(tmp_path, "base.yaml", "SOLVER: {MAX_ITER: 7, BASE_LR: 0.5}\n")
    for base, steps in [
        ("base.yaml", 7),
        ("COCO-Detection/faster_rcnn_R_50_FPN_1x.yaml", 90000),
        ("[COCO-Detection/faster_rcnn_R_50_FPN_1x.yaml, base.yaml]", 7),
    ]:
        file = write(tmp_path, "sub.yaml", f"_BASE_: {base}\nSOLVER: {{IMS_PER_BATCH: 3}}\n")
        cfg = load_cfg(file)
        assert (cfg.SOLVER.MAX_ITER, cfg.SOLVER.IMS_PER_BATCH) == (steps, 3)


def test_a_base_that_goes_in_a_circle(tmp_path):
    file = write(tmp_path, "a.yaml", "_BASE_: b.yaml\n")
    write(tmp_path, "b.yaml", "_BASE_: a.yaml\n")
    with pytest.raises(UserError, match="circle"):
        read_yaml(file)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("- 1\n- 2\n", "KEY: value"),
        ("SOLVER: [1\n", "not valid YAML"),
        ("just words", "KEY: value"),
        ("a: \x00", "not valid YAML"),
        ("MODEL:\n  MASK_ON: False\nSOLVER\n  MAX_ITER: 5\n", "Line 3, `SOLVER`, lacks its colon"),
        ("SOLVER:\n  AMP\n    ENABLED: True\n", "Line 2, `AMP`, lacks its colon"),
    ],
)
def test_files_that_are_no_config(tmp_path, text, message):
    file = write(tmp_path, "x.yaml", text)
    with pytest.raises(UserError, match=message) as error:
        load_cfg(file)
    assert file in str(error.value)


def test_the_article_as_it_was_printed_names_both_lines(tmp_path):
    text = "MODEL:\n  MASK_ON: False\nSOLVER\n  IMS_PER_BATCH: 16\n  AMP\n    ENABLED: True\n"
    with pytest.raises(UserError, match="Line 3, `SOLVER`.*Line 5, `AMP`"):
        load_cfg(write(tmp_path, "article.yaml", text))


def test_yaml_that_would_run_code_is_refused_unless_trusted(tmp_path):
    marker = tmp_path / "ran"
    tag = f"!!python/object/apply:os.mkdir ['{marker}']"
    file = write(tmp_path, "evil.yaml", f"OUTPUT_DIR: {tag}\n")
    base = write(tmp_path, "over.yaml", "_BASE_: evil.yaml\nVERSION: 2\n")
    for name in (file, base):
        with pytest.raises(UserError, match="line 1.*--trust"):
            load_cfg(name)
        assert not marker.exists()
    read_yaml(file, trust=True)
    assert marker.exists()
