"""install() on small projects that know Detectron2 only: one for every pattern that public repositories have.

They are imported before install() is called, so that the names that they copied are served as well.
"""

import copy
import json
import logging
import pickle
import sys
import threading

import pytest
import torch
from conftest import ROOT
from detectron2.config import CfgNode, LazyConfig, get_cfg
from detectron2.config.defaults import _C
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.engine import AMPTrainer as StockAMPTrainer
from detectron2.engine import DefaultTrainer, SimpleTrainer
from detectron2.evaluation import DatasetEvaluator
from detectron2.modeling import META_ARCH_REGISTRY, build_model
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import d2amp_ext
from d2amp_ext import (
    AMPTrainer,
    PrecisionCheckpointer,
    PrecisionPolicy,
    PrecisionTrainerMixin,
    UserError,
    add_amp_config,
)
from d2amp_ext.patches import models, table

sys.path.insert(0, str(ROOT / "tests" / "repositories"))
try:
    import amp_subclass
    import chosen_trainer
    import default
    import extra_arguments
    import full_model_clipping
    import keeps_trainer
    import own_checkpointer
    import own_get_cfg
    import own_keys
    import own_scaler
    import own_step
    import plain_loop
    import skips_constructor
    import swaps_trainer
    import teacher
    import tiny
    import two_optimizers
    import unseen_model
finally:
    sys.path.pop(0)

ON = ["SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION"]
# A first scale that fits, so that no step is skipped.
PRECISIONS = {"fp32": [*ON, "fp32"], "bf16": [*ON, "bf16"], "fp16": [*ON, "fp16", "SOLVER.AMP.SCALER.INIT_SCALE", 128]}
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture
def installed():
    d2amp_ext.install()
    yield
    d2amp_ext.uninstall()


@pytest.fixture
def log(caplog):
    """A function that gives what d2amp_ext has logged."""
    caplog.set_level(logging.INFO, logger="d2amp_ext")
    return lambda: "\n".join(r.getMessage() for r in caplog.records if r.name.startswith("d2amp_ext"))


def explicit_cfg():
    cfg = get_cfg()
    add_amp_config(cfg)
    return cfg


def explicit(cls, opts, folder):
    """What the project's trainer does with the mixin in front, as its author would write it."""
    mixed = type("Explicit", (PrecisionTrainerMixin, cls), {})
    trainer = mixed(tiny.setup(opts, folder, explicit_cfg))
    trainer.train()
    return trainer


def in_own_loop(precision, folder, arch="TinyArch"):
    """A loop with policy.autocast(), as its author would write it."""
    policy = PrecisionPolicy(precision).resolve("cpu")

    def build(cfg):
        model = build_model(cfg)
        forward = model.forward

        def under_policy(*args, **kwargs):
            with policy.autocast():
                return forward(*args, **kwargs)

        model.forward = under_policy
        return model

    with policy.float32_switches():
        return plain_loop.main(["MODEL.META_ARCHITECTURE", arch], folder, build)


def same(model, other):
    """Whether two models saw the same losses and have the same weights, bit for bit."""
    assert model.history and model.history == other.history
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


# What is changed, and what is put back


def everything():
    """What `install` touches, as it is now."""
    state = {(id(owner), name): vars(owner).get(name) for owner, name, _ in table.ATTRIBUTES}
    state |= {
        (id(f), n): getattr(f, n) for f, _ in table.FUNCTIONS for n in ("__code__", "__defaults__", "__kwdefaults__")
    }
    state["dump"], state["class"], state["order"] = _C.dump(), type(_C), list(_C.SOLVER)
    state["sets"] = sorted(DatasetCatalog.list()), sorted(MetadataCatalog.list())
    state["registry"] = dict(iter(META_ARCH_REGISTRY))
    state["hooks"] = dict(_global_optimizer_pre_hooks)
    state["switches"] = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    return state


def test_uninstall_leaves_no_trace(tmp_path):
    before = everything()
    d2amp_ext.install()
    during = everything()
    changed = {key for key in before if before[key] is not during[key] and before[key] != during[key]}
    assert {key for key in before if isinstance(key, tuple)} - changed <= {
        (id(f), name) for f, _ in table.FUNCTIONS for name in ("__defaults__", "__kwdefaults__")
    }
    model = plain_loop.main([*ON, "fp32"], tmp_path)
    default.main([*ON, "bf16"], tmp_path)
    assert MetadataCatalog.get("d2amp_shapes_val").thing_classes
    assert models.served(model)
    d2amp_ext.uninstall()
    after = everything()
    assert before.keys() == after.keys()
    for key in before:
        assert before[key] is after[key] or before[key] == after[key], key
    assert not models.served(model) and not model._forward_hooks and not model._forward_pre_hooks
    assert "PRECISION" not in get_cfg().SOLVER.AMP
    trainer = default.main([], tmp_path)
    assert type(trainer) is default.Trainer and type(trainer._trainer) is SimpleTrainer


def test_installing_twice_and_uninstalling_once():
    before = everything()
    d2amp_ext.install()
    during = everything()
    d2amp_ext.install()
    assert everything().keys() == during.keys() and all(
        everything()[k] is during[k] for k in during if isinstance(k, tuple)
    )
    d2amp_ext.uninstall()
    assert everything()["dump"] == before["dump"] and not table.is_installed()
    d2amp_ext.uninstall()
    assert all(everything()[key] is before[key] for key in before if isinstance(key, tuple))


def test_threads_may_install_and_uninstall_at_once():
    before, errors = everything(), []

    def work():
        try:
            for _ in range(10):
                d2amp_ext.install()
                assert default.DefaultTrainer.__init__ and get_cfg().MODEL.META_ARCHITECTURE
                d2amp_ext.uninstall()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    d2amp_ext.uninstall()
    after = everything()
    assert not errors and all(before[key] is after[key] or before[key] == after[key] for key in before)


def test_an_installation_that_fails_half_way_is_taken_back(monkeypatch):
    before = everything()
    monkeypatch.setattr(table, "FUNCTIONS", [(len, lambda stock: stock)])  # has no code to exchange
    with pytest.raises(AttributeError):
        d2amp_ext.install()
    monkeypatch.undo()
    after = everything()
    assert all(before[key] is after[key] or before[key] == after[key] for key in before) and not table.is_installed()


def test_keys_that_a_project_adds_to_the_defaults_stay():
    d2amp_ext.install()
    _C.SOLVER.AMP.OF_A_PROJECT = 3
    try:
        d2amp_ext.uninstall()
        assert list(_C.SOLVER.AMP) == ["ENABLED", "OF_A_PROJECT"]
    finally:
        del _C.SOLVER.AMP["OF_A_PROJECT"]


# Off is off


@pytest.mark.parametrize("cls", [default.Trainer, skips_constructor.Trainer, own_step.Trainer, teacher.Trainer])
def test_off_is_off(cls, tmp_path, log):
    stock = default.main([], tmp_path / "stock", cls)
    d2amp_ext.install()
    try:
        ours = default.main([], tmp_path / "ours", cls)
    finally:
        d2amp_ext.uninstall()
    assert same(ours.model, stock.model)
    assert type(ours._trainer) is SimpleTrainer and ours.model.dtypes == stock.model.dtypes


def test_off_is_off_without_default_trainer(tmp_path, installed, log):
    trainer = chosen_trainer.main([], tmp_path / "ours")
    loop = plain_loop.main([], tmp_path / "loop")
    assert type(trainer) is SimpleTrainer and "AMP" not in log()
    d2amp_ext.uninstall()
    assert same(trainer.model, chosen_trainer.main([], tmp_path / "stock").model)
    assert same(loop, plain_loop.main([], tmp_path / "loop_stock"))


def test_unused_keys_are_named_once(tmp_path, installed, log):
    default.main(["SOLVER.AMP.PRECISION", "bf16"], tmp_path)
    skips = ["SOLVER.AMP.PRECISION", "fp16"]
    default.main(skips, tmp_path, skips_constructor.Trainer)
    assert log().count("SOLVER.AMP.PRECISION have no effect") == 2


# Subclasses of DefaultTrainer


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("cls", [default.Trainer, keeps_trainer.Trainer, skips_constructor.Trainer, own_checkpointer.Trainer,
                                 full_model_clipping.Trainer])  # fmt: skip
def test_a_trainer_trains_as_with_the_mixin(cls, precision, tmp_path, installed, log):
    ours = default.main(PRECISIONS[precision], tmp_path / "ours", cls)
    assert isinstance(ours, PrecisionTrainerMixin) and isinstance(ours, cls) and isinstance(ours._trainer, AMPTrainer)
    assert type(ours).__name__ == cls.__name__ and type(ours).__module__ == cls.__module__
    assert ours.policy.precision == precision and ours.last_step.iteration == 4 and not ours.last_step.skipped
    assert set(ours.model.dtypes) == {DTYPES[precision]} and type(ours.model) is tiny.TinyArch
    assert isinstance(ours.checkpointer, PrecisionCheckpointer)
    assert log().count(f"Precision of training: {precision}") == 1 and "own" not in log()
    norms = list(full_model_clipping.ClippingSGD.norms)
    d2amp_ext.uninstall()
    assert same(ours.model, explicit(cls, PRECISIONS[precision], tmp_path / "explicit").model)
    if cls is full_model_clipping.Trainer:
        assert norms == full_model_clipping.ClippingSGD.norms and 0 < norms[0] < 100  # true gradients, not scaled ones
    if cls is keeps_trainer.Trainer:
        assert ours.seen == [0, 1, 2, 3, 4]


def test_the_files_of_a_run_are_read_by_stock_detectron2(tmp_path, installed):
    default.main([*ON, "fp16"], tmp_path)
    d2amp_ext.uninstall()
    trainer = default.Trainer(tiny.setup(["SOLVER.MAX_ITER", "8"], tmp_path))
    trainer.resume_or_load(resume=True)
    assert trainer.start_iter == 5
    trainer.train()
    assert torch.load(tmp_path / "model_final.pth", weights_only=True)["iteration"] == 7


@pytest.mark.parametrize("cls", [default.Trainer, skips_constructor.Trainer])
def test_accumulation_and_the_lr_reach_a_trainer(cls, tmp_path, installed):
    opts = [*ON, "bf16", "SOLVER.ACCUMULATE_STEPS", "2", "SOLVER.REFERENCE_WORLD_SIZE", "1", "SOLVER.BASE_LR", "0.02"]
    ours = default.main(opts, tmp_path / "ours", cls)
    assert ours._trainer.accumulate_steps == 2 and len(ours.model.history) == 2 * ours.max_iter == 4
    assert ours.optimizer.param_groups[0]["lr"] == pytest.approx(0.04)
    d2amp_ext.uninstall()
    assert same(ours.model, explicit(default.Trainer, opts, tmp_path / "explicit").model)


def test_a_checkpointer_without_the_trainer_saves_and_loads(tmp_path, installed):
    trainer = default.main([*ON, "fp16"], tmp_path, own_checkpointer.Trainer)
    assert type(trainer.checkpointer) is PrecisionCheckpointer and not trainer.checkpointer.checkpointables
    trainer.checkpointer.save("alone")
    again = own_checkpointer.Trainer(tiny.setup([*ON, "fp16", "MODEL.WEIGHTS", str(tmp_path / "alone.pth")], tmp_path))
    again.resume_or_load(resume=False)
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), trainer.model.parameters()))


@pytest.mark.parametrize(
    "cls, inner", [(swaps_trainer.Trainer, "SimpleTrainer"), (swaps_trainer.CountingTrainer, "Counting")]
)
def test_a_trainer_that_swaps_the_inner_one_for_one_with_a_stock_step(cls, inner, tmp_path, installed):
    ours = default.main([*ON, "bf16"], tmp_path, cls)
    assert type(ours._trainer).__name__ == inner and isinstance(ours._trainer, (cls.inner, AMPTrainer))
    assert set(ours.model.dtypes) == {torch.bfloat16} and ours.last_step.iteration == 4
    assert inner != "Counting" or ours._trainer.steps == 5
    d2amp_ext.uninstall()
    assert same(ours.model, explicit(default.Trainer, [*ON, "bf16"], tmp_path).model)


def test_a_trainer_that_swaps_the_inner_one_for_one_with_a_step_of_its_own(tmp_path, installed, log):
    ours = default.main([*ON, "bf16"], tmp_path, swaps_trainer.HalvingTrainer)
    assert type(ours._trainer) is swaps_trainer.Halving and ours.last_step is None
    assert set(ours.model.dtypes) == {torch.bfloat16}
    assert "Halving.run_step is a training step of the script's own" in log()
    assert "TinyArch in a loop of its own: its forward pass runs in bf16" in log()


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_a_step_that_never_reaches_the_inner_trainer(precision, tmp_path, installed, log):
    ours = default.main([*ON, precision], tmp_path / "ours", own_step.Trainer)
    assert set(ours.model.dtypes) == {DTYPES[precision]}
    assert f"TinyArch in a loop of its own: its forward pass runs in {precision}" in log()
    d2amp_ext.uninstall()
    assert same(ours.model, in_own_loop(precision, tmp_path / "explicit"))


def test_two_optimizers(tmp_path, installed, log):
    ours = default.main([*ON, "bf16"], tmp_path, two_optimizers.Trainer)
    assert set(ours.model.dtypes) == {torch.bfloat16} and "AMP is off" not in log()
    stock = default.main([], tmp_path, two_optimizers.Trainer)
    assert not torch.equal(ours.model.second.weight, stock.model.second.weight)


def test_forwards_with_more_arguments_and_results(tmp_path, installed):
    opts = ["MODEL.META_ARCHITECTURE", "BranchArch"]
    ours = default.main([*opts, *ON, "bf16"], tmp_path, extra_arguments.Trainer)
    assert set(ours.model.dtypes) == {torch.bfloat16} and type(ours.model) is extra_arguments.BranchArch
    d2amp_ext.uninstall()
    stock = default.main(opts, tmp_path, extra_arguments.Trainer)
    assert ours.model.history != stock.model.history and ours.model.history == pytest.approx(
        stock.model.history, rel=0.05
    )


@pytest.mark.parametrize("evaluation", [[], ["TEST.AMP.ENABLED", "True", "TEST.AMP.PRECISION", "bf16"]])
def test_a_teacher_and_its_student(evaluation, tmp_path, installed):
    ours = default.main([*ON, "bf16", *evaluation], tmp_path, teacher.Trainer)
    assert set(ours.model.dtypes) == {torch.bfloat16}
    assert set(ours.teacher.dtypes) == {torch.bfloat16 if evaluation else torch.float32}
    assert {output.dtype for output in ours.outputs} == {torch.float32}  # whatever the precision
    assert ours.teacher.dtypes is not ours.model.dtypes and models.served(ours.teacher) is not models.served(ours.model)


def test_the_mixin_of_an_explicit_user_is_left_alone(tmp_path, installed):
    class Mine(PrecisionTrainerMixin, default.Trainer):
        pass

    trainer = default.main([*ON, "bf16"], tmp_path, Mine)
    assert type(trainer) is Mine and trainer.last_step.iteration == 4


# Trainers that a script makes


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_trainer_chosen_from_names_imported_earlier(precision, tmp_path, installed, log):
    ours = chosen_trainer.main([*PRECISIONS[precision], "MONITOR.PERIOD", 1], tmp_path / "ours")
    assert isinstance(ours, AMPTrainer) and type(ours).__name__ == "AMPTrainer" and ours.policy.precision == precision
    assert set(ours.model.dtypes) == {DTYPES[precision]} and ours.last_step.iteration == 4
    assert log().count("Precision of training") == 1
    assert ours.storage.history("precision/consecutive_skips").latest() == 0  # the monitor's
    d2amp_ext.uninstall()
    assert same(ours.model, explicit(default.Trainer, PRECISIONS[precision], tmp_path / "explicit").model)


def test_arguments_of_a_script_s_amp_trainer_are_kept(tmp_path, installed, log):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    ours = chosen_trainer.main([*ON, "fp16"], tmp_path, grad_scaler=scaler, log_grad_scaler=True, async_write_metrics=True,
                               gather_metric_period=3, zero_grad_before_forward=True)  # fmt: skip
    assert (
        ours.grad_scaler is scaler and ours.last_step.scale == 8 and ours.log_grad_scaler and ours.async_write_metrics
    )
    assert ours.gather_metric_period == 3 and ours.zero_grad_before_forward
    ours = chosen_trainer.main([*ON, "auto"], tmp_path, precision=torch.bfloat16)
    assert ours.policy.precision == "bf16"
    ours = chosen_trainer.main([*ON, "fp32"], tmp_path, precision=torch.bfloat16)
    assert ours.policy.precision == "fp32" and "The script asks AMPTrainer for bf16" in log()
    with pytest.raises(TypeError, match="no_such"):
        chosen_trainer.main([*ON, "bf16"], tmp_path, no_such=1)


def test_a_script_s_trainer_resumes_and_stock_reads_its_files(tmp_path, installed):
    opts = [*ON, "fp16", "SOLVER.CHECKPOINT_PERIOD", "3", "SOLVER.MAX_ITER"]
    first = chosen_trainer.main([*opts, "3"], tmp_path / "parts")
    second = chosen_trainer.main([*opts, "6"], tmp_path / "parts", resume=True)
    assert second.start_iter == 3 and second.last_step.iteration == 5
    assert first.last_step.skips == 1 and first.last_step.scale == 32768  # which the resumed run went on from
    assert second.last_step.skips >= 1 and second.last_step.scale <= 32768
    content = torch.load(tmp_path / "parts" / "model_final.pth", weights_only=True)
    assert {"model", "trainer", "resume", "iteration"} <= content.keys() and content["resume"]["ranks"][0]["random"]
    assert content["trainer"]["grad_scaler"]["scale"] == second.grad_scaler.get_scale()
    d2amp_ext.uninstall()
    stock = chosen_trainer.main(["SOLVER.MAX_ITER", "8"], tmp_path / "parts", resume=True)
    assert type(stock) is SimpleTrainer and stock.start_iter == 6


@pytest.mark.parametrize("main", [chosen_trainer.main, default.main])
def test_bundles_of_a_script_s_run(main, tmp_path, installed):
    from d2amp_ext.numerics.bundle import read_bundle

    opts = [*ON, "bf16", "SOLVER.BASE_LR", "1e30", "SOLVER.AMP.MAX_CONSECUTIVE_SKIPS", "0"]
    with pytest.raises(d2amp_ext.NonFiniteError, match="d2amp replay") as error:
        main(opts, tmp_path)
    (path,) = (tmp_path / "nonfinite").iterdir()
    bundle = read_bundle(path)
    assert bundle["config_kind"] == "yaml" and "META_ARCHITECTURE: TinyArch" in bundle["config"]
    assert bundle["finding"]["description"] in str(error.value) and bundle["finding"]["forward"]["cls"]


@pytest.mark.parametrize("kind, names", [(amp_subclass.Named, ["a name"]), (amp_subclass.Around, [])])
def test_a_subclass_of_amp_trainer_keeps_its_parts(kind, names, tmp_path, installed, log):
    ours = amp_subclass.main([*ON, "bf16"], tmp_path, kind, *names)
    assert isinstance(ours, (kind,)) and isinstance(ours, AMPTrainer) and type(ours).__name__ == kind.__name__
    assert ours.last_step.iteration == 4 and set(ours.model.dtypes) == {torch.bfloat16} and "own" not in log()
    if names:
        assert ours.name == "a name" and ours.ready and ours.zero_grad_before_forward
    else:
        assert ours.done == 4
    d2amp_ext.uninstall()
    assert same(ours.model, explicit(default.Trainer, [*ON, "bf16"], tmp_path / "explicit").model)


def test_a_subclass_of_amp_trainer_with_a_step_of_its_own_stays(tmp_path, installed, log):
    ours = amp_subclass.main([*ON, "bf16"], tmp_path, amp_subclass.Own)
    assert type(ours) is amp_subclass.Own and set(ours.model.dtypes) == {torch.bfloat16}
    assert "Own.run_step is a training step of the script's own" in log()
    assert "TinyArch is trained under an autocast of the script's own" in log() and "AMP is off" not in log()
    ours = amp_subclass.main([], tmp_path, amp_subclass.Own)
    assert type(ours) is amp_subclass.Own


def test_a_second_optimizer_beside_our_trainer_is_not_talked_about(tmp_path, installed, log):
    class Trainer(default.Trainer):
        def after_step(self):
            super().after_step()
            torch.optim.SGD(self.model.parameters(), lr=0.0).step()

    default.main([*ON, "bf16"], tmp_path, Trainer)
    assert "AMP is off" not in log()


def test_a_trainer_s_own_way_to_write_metrics_is_told_of(tmp_path, installed, log):
    class Writing(StockAMPTrainer):
        def _write_metrics(self, *args, **kwargs):
            raise AssertionError

    amp_subclass.main([*ON, "bf16"], tmp_path, Writing)
    assert "Writing has a way of its own to write metrics" in log()
    amp_subclass.main([*ON, "bf16"], tmp_path, amp_subclass.Around)
    assert "Around" not in log()


def test_a_trainer_of_the_registry(tmp_path, installed):
    @d2amp_ext.TRAINER_REGISTRY.register()
    class Patient(AMPTrainer):
        pass

    try:
        ours = chosen_trainer.main([*ON, "bf16", "SOLVER.AMP.TRAINER", "Patient"], tmp_path)
        inner = default.main([*ON, "bf16", "SOLVER.AMP.TRAINER", "Patient"], tmp_path)._trainer
        assert isinstance(ours, Patient) and isinstance(inner, Patient) and isinstance(ours, StockAMPTrainer)
        with pytest.raises(UserError, match="SOLVER.AMP.TRAINER = 'Nobody' is not in TRAINER_REGISTRY"):
            chosen_trainer.main([*ON, "bf16", "SOLVER.AMP.TRAINER", "Nobody"], tmp_path)
    finally:
        d2amp_ext.TRAINER_REGISTRY._obj_map.pop("Patient")


# Loops without a trainer


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_a_loop_without_a_trainer(precision, tmp_path, installed, log):
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    ours = plain_loop.main([*ON, precision], tmp_path)
    assert torch.backends.cudnn.allow_tf32 == {"fp32": False, "tf32": False}.get(precision, before[1])  # this is a CPU
    assert set(ours.dtypes) == {DTYPES[precision]} and type(ours) is tiny.TinyArch
    assert log().count(f"TinyArch in a loop of its own: its forward pass runs in {precision}") == 1
    d2amp_ext.uninstall()
    assert before == (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
    assert same(ours, in_own_loop(precision, tmp_path))


def test_the_switches_of_a_loop_end_with_the_next_one_without_amp(tmp_path, installed):
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    plain_loop.main([*ON, "fp32"], tmp_path)
    assert not torch.backends.cudnn.allow_tf32
    plain_loop.main([], tmp_path)
    assert before == (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)


@pytest.mark.parametrize("main", [plain_loop.main, lambda opts, folder: default.main(opts, folder, own_step.Trainer)])
def test_fp16_without_a_scaler_is_refused_before_anything_changes(main, tmp_path, installed, monkeypatch):
    steps = []
    monkeypatch.setattr(torch.optim.SGD, "step", lambda *args, **kwargs: steps.append(1))
    with pytest.raises(
        UserError, match="SOLVER.AMP.PRECISION = 'fp16' needs gradients that are scaled.*TinyArch.*bf16, tf32"
    ):
        main([*ON, "fp16"], tmp_path)
    assert not steps


def test_a_script_with_its_own_key_and_scaler_is_left_alone(tmp_path, installed, log):
    alone = own_scaler.main(["SOLVER.FP16", "True"], tmp_path)
    assert log() == ""
    both = own_scaler.main(["SOLVER.FP16", "True", *ON, "fp16"], tmp_path)
    assert "TinyArch is trained under an autocast of the script's own" in log()
    off = own_scaler.main(["SOLVER.FP16", "False"], tmp_path)
    d2amp_ext.uninstall()
    stock = own_scaler.main(["SOLVER.FP16", "True"], tmp_path)
    assert same(alone, stock) and same(both, stock) and set(both.dtypes) == {torch.float16}
    assert set(off.dtypes) == {torch.float32}


def test_a_scaler_of_the_script_that_is_off_does_not_count(tmp_path, installed):
    with pytest.raises(UserError, match="without a gradient scaler"):
        own_scaler.main(["SOLVER.FP16", "False", *ON, "fp16"], tmp_path)


def test_a_model_that_nobody_saw_is_told_of(tmp_path, installed, log):
    ours = unseen_model.main([*ON, "bf16"], tmp_path)
    assert set(ours.dtypes) == {torch.float32}
    assert log().count("AMP is off for the updates of SGD: the script updates a model that d2amp_ext did not see") == 1


def test_a_model_whose_forward_is_gone_around_is_told_of(tmp_path, installed, log):
    model = build_model(tiny.setup([*ON, "bf16"], tmp_path))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.second(model.first(torch.ones(2, 8))).sum().backward()
    optimizer.step()
    assert "the script updates TinyArch trained without a call of the model itself" in log()


def test_a_hand_written_loop_with_amp_step_is_not_talked_into(tmp_path, installed, log):
    cfg = tiny.setup([*ON, "fp16"], tmp_path)
    model = build_model(cfg).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = PrecisionPolicy.from_cfg(cfg).resolve("cpu")
    record = d2amp_ext.amp_step(
        (model(batch) for batch in tiny.loader(1)), optimizer, policy=policy, scaler=policy.make_scaler()
    )
    assert not record.skipped and "own" not in log() and "AMP is off" not in log()


# Models


def test_a_model_stays_what_it_is(tmp_path, installed):
    cfg = tiny.setup([*ON, "bf16", "TEST.AMP.ENABLED", "True", "TEST.AMP.PRECISION", "bf16"], tmp_path)
    model = build_model(cfg)
    d2amp_ext.uninstall()
    stock = build_model(tiny.setup([], tmp_path))
    assert type(model) is type(stock) is tiny.TinyArch and list(model.state_dict()) == list(stock.state_dict())
    assert {name for name, _ in model.named_modules()} == {name for name, _ in stock.named_modules()}
    assert repr(model) == repr(stock) and not hasattr(model, "module")


def test_copies_of_a_model_are_served_by_themselves(tmp_path, installed):
    cfg = tiny.setup(["TEST.AMP.ENABLED", "True", "TEST.AMP.PRECISION", "bf16"], tmp_path)
    model = build_model(cfg).eval()
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for twin in (model, *twins):
        output = twin(tiny.loader(1)[0])[0]["scores"]
        assert twin.dtypes == [torch.bfloat16] and output.dtype is torch.float32
    d2amp_ext.uninstall()
    assert twins[0](tiny.loader(1)[0])[0]["scores"].dtype is torch.float32 and twins[0].dtypes[-1] is torch.float32


def test_a_forward_that_fails_leaves_no_autocast_behind(tmp_path, installed):
    model = build_model(tiny.setup([*ON, "bf16"], tmp_path)).train()
    with pytest.raises(KeyError):
        model([{"y": 1}])
    assert not torch.is_autocast_enabled("cpu") and not models._calls()
    with pytest.raises(UserError):
        build_model(tiny.setup([*ON, "fp16"], tmp_path)).train()(tiny.loader(1)[0])
    assert not torch.is_autocast_enabled("cpu") and not models._calls()


def test_the_registry_gives_what_can_be_used_as_the_class(tmp_path, installed):
    entry = META_ARCH_REGISTRY.get("TinyArch")
    assert entry == tiny.TinyArch and hash(entry) == hash(tiny.TinyArch) and entry.__name__ == "TinyArch"
    assert entry.forward is tiny.TinyArch.forward and isinstance(tiny.TinyArch(None), entry)

    class Sub(entry):
        pass

    assert issubclass(Sub, tiny.TinyArch) and issubclass(tiny.TinyArch, entry) and not issubclass(nn.Linear, entry)
    with pytest.raises(KeyError, match="NoSuchArch"):
        META_ARCH_REGISTRY.get("NoSuchArch")


class Scores(DatasetEvaluator):
    def reset(self):
        self.outputs = []

    def process(self, inputs, outputs):
        self.outputs += [output["scores"] for output in outputs]

    def evaluate(self):
        return {"tiny": {"dtype": float(self.outputs[0].dtype is torch.float32)}}


@pytest.mark.parametrize("make", [build_model, lambda cfg: tiny.TinyArch(cfg)])
def test_evaluation_by_the_class(make, tmp_path, installed):
    class Trainer(default.Trainer):
        @classmethod
        def build_test_loader(cls, cfg, name):
            return tiny.loader(2)

    opts = ["TEST.AMP.ENABLED", "True", "TEST.AMP.PRECISION", "bf16", "DATASETS.TEST", "('some_set',)"]
    cfg = tiny.setup(opts, tmp_path)
    model = make(cfg)
    assert Trainer.test(cfg, model, [Scores()]) == {"tiny": {"dtype": 1.0}}
    assert model.dtypes == [torch.bfloat16] * 2
    # The same from the trainer, whose class is another one by now.
    trainer = Trainer(cfg)
    assert trainer.test(cfg, trainer.model, [Scores()]) == {"tiny": {"dtype": 1.0}}
    assert trainer.model.dtypes == [torch.bfloat16] * 2


# Configs


def test_get_cfg_knows_the_keys_and_spellings(tmp_path, installed):
    cfg = get_cfg()
    (tmp_path / "c.yaml").write_text("SOLVER:\n  AMP:\n    PRECISION: 16\n    ENABLED: yes\n")
    cfg.merge_from_file(str(tmp_path / "c.yaml"))
    assert PrecisionPolicy.from_cfg(cfg).precision == "fp16"
    with pytest.raises(UserError, match="Did you mean SOLVER.AMP.PRECISION"):
        cfg.merge_from_list(["SOLVER.AMP.PRECISON", "bf16"])
    cfg.merge_from_list(["SOLVER.AMP.PRECISION", "bf17"])
    with pytest.raises(UserError, match="bf17.*bf16"):
        default.Trainer(cfg)
    with pytest.raises(UserError, match="SOLVER.AMP.PRECISION"):
        build_model(cfg)


def test_yaml_runs_code_only_with_trust(tmp_path):
    (tmp_path / "c.yaml").write_text("MODEL:\n  WEIGHTS: !!python/object/apply:os.getcwd []\n")
    d2amp_ext.install()
    with pytest.raises(UserError, match="--trust"):
        get_cfg().merge_from_file(str(tmp_path / "c.yaml"))
    d2amp_ext.uninstall()
    d2amp_ext.install(trust=True)
    try:
        cfg = get_cfg()
        cfg.merge_from_file(str(tmp_path / "c.yaml"))
        assert cfg.MODEL.WEIGHTS
    finally:
        d2amp_ext.uninstall()


def test_the_stock_config_has_no_key_of_ours(tmp_path, installed):
    from d2amp_ext.config import write_stock_config

    cfg = tiny.setup([*ON, "bf16", "SOLVER.BASE_LR", "0.5"], tmp_path)
    write_stock_config(cfg, str(tmp_path / "stock.yaml"))
    d2amp_ext.uninstall()
    stock = get_cfg()
    stock.merge_from_file(str(tmp_path / "stock.yaml"))
    assert stock.SOLVER.BASE_LR == 0.5 and stock.SOLVER.AMP == {"ENABLED": True}


def test_a_get_cfg_of_a_project_s_own(tmp_path, installed):
    ours = own_get_cfg.main([*ON, "bf16", "MODEL.TINY_WIDTH", "3"], tmp_path)
    assert ours.policy.precision == "bf16" and ours.cfg.MODEL.TINY_WIDTH == 3 and ours.cfg.SOLVER.ACCUMULATE_STEPS == 1
    assert "PRECISION" not in own_get_cfg._DEFAULTS.SOLVER.AMP  # the project's own defaults are not ours to change


def test_a_config_that_is_only_made_in_code(tmp_path, installed):
    cfg = own_get_cfg.get_cfg()
    cfg.merge_from_other_cfg(tiny.setup([], tmp_path, own_get_cfg.get_cfg))
    cfg.SOLVER.AMP.ENABLED = True
    cfg.freeze()
    trainer = default.Trainer(cfg)
    assert trainer.policy.precision in DTYPES and cfg.is_frozen()


@pytest.mark.parametrize("order", ["before", "after"])
def test_keys_of_a_project_s_own(order, tmp_path, installed):
    cfg = own_keys.make_cfg(**{order: [add_amp_config]})
    assert cfg.SOLVER.OPTIMIZER == "ADAMW" and cfg.MODEL.TINY.WIDTH == 16
    ours = default.Trainer(tiny.setup([*ON, "bf16", "SOLVER.OPTIMIZER", "ADAMW"], tmp_path, lambda: cfg))
    assert type(ours.optimizer).__name__ == "AdamW" and ours.cfg.SOLVER.BACKBONE_MULTIPLIER == 0.1
    assert own_keys.make_cfg().SOLVER.OPTIMIZER == "ADAMW"


def test_a_part_of_a_config_gets_no_keys(installed):
    part = CfgNode({"SOLVER": {"BASE_LR": 0.1, "AMP": {"ENABLED": False}}, "MODEL": {"DEVICE": "cpu"}})
    part.merge_from_list(["SOLVER.BASE_LR", 0.2])
    assert type(part) is CfgNode and list(part.SOLVER.AMP) == ["ENABLED"]


def test_a_project_s_key_where_we_have_a_section(tmp_path, installed):
    cfg = own_get_cfg.get_cfg()
    cfg.SOLVER.DDP = False
    with pytest.raises(UserError, match="DDP = False, where d2amp_ext has a section"):
        cfg.merge_from_list(["SOLVER.BASE_LR", 0.2])


def test_data_sets_are_registered_when_they_are_asked_for(tmp_path, installed, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    for name in ("d2amp_shapes_train", "d2amp_shapes_val"):  # another test may have registered them
        DatasetCatalog.pop(name, None)
        MetadataCatalog.pop(name, None)
    d2amp_ext.uninstall()
    d2amp_ext.install()  # which remembers what was registered before
    assert MetadataCatalog.get("d2amp_shapes_val").thing_classes
    assert len(DatasetCatalog.get("d2amp_shapes_val")) > 0
    (tmp_path / "images").mkdir()
    images = [{"id": 1, "file_name": "a.png", "height": 8, "width": 8}]
    boxes = [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 4, 4], "area": 16, "iscrowd": 0}]
    content = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "cell"}]}
    (tmp_path / "a.json").write_text(json.dumps(content))
    tiny.setup(["DATASETS.REGISTER", (f"mine=coco:{tmp_path}/a.json:{tmp_path}/images",)], tmp_path)
    assert "mine" not in DatasetCatalog
    assert MetadataCatalog.get("mine").thing_classes == ["cell"] and "mine" in DatasetCatalog
    assert len(DatasetCatalog.get("mine")) == 1
    with pytest.raises(KeyError, match="nobodys"):
        DatasetCatalog.get("nobodys")
    d2amp_ext.uninstall()
    assert not {"mine", "d2amp_shapes_val"} & set(DatasetCatalog)


LAZY = """
from detectron2.config import LazyCall as L
import torch
train = dict(amp=dict(enabled={enabled}), max_iter=3, output_dir="x", device="cpu")
model = L(torch.nn.Linear)(in_features=1, out_features=1)
dataloader = dict()
optimizer = L(torch.optim.SGD)(lr=0.1)
"""


def test_names_of_a_lazy_config(tmp_path, installed):
    (tmp_path / "c.py").write_text(LAZY.format(enabled=False))
    config = LazyConfig.load(str(tmp_path / "c.py"))
    LazyConfig.apply_overrides(config, ["train.amp.precision=bf16", "train.amp.enabled=True"])
    with pytest.raises(UserError, match="train.amp.enable. Did you mean train.amp.enabled"):
        LazyConfig.apply_overrides(config, ["train.amp.enable=True"])


def test_a_trainer_of_a_lazy_config_script(tmp_path, installed):
    (tmp_path / "c.py").write_text(LAZY.format(enabled=True))
    config = LazyConfig.load(str(tmp_path / "c.py"))
    config = LazyConfig.apply_overrides(config, ["train.amp.precision=bf16", "train.accumulate_steps=2",
                                                 "train.eval_amp.enabled=True", "train.eval_amp.precision=bf16"])  # fmt: skip
    model = tiny.TinyArch(None)
    trainer = chosen_trainer.AMPTrainer(model, tiny.loader(), torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.train(0, config.train.max_iter)
    assert isinstance(trainer, AMPTrainer) and trainer.accumulate_steps == 2 and trainer.policy.precision == "bf16"
    assert len(model.history) == 6 and set(model.dtypes) == {torch.bfloat16}
    assert model.eval()(tiny.loader(1)[0])[0]["scores"].dtype is torch.float32 and model.dtypes[-1] is torch.bfloat16


def test_default_trainer_itself(tmp_path, installed, monkeypatch):
    """Not a subclass of it."""
    monkeypatch.setattr(DefaultTrainer, "build_train_loader", classmethod(lambda cls, cfg: tiny.loader()))
    trainer = default.main([*ON, "bf16"], tmp_path, DefaultTrainer)
    assert type(trainer).__name__ == "DefaultTrainer" and trainer.last_step.iteration == 4


def test_a_model_in_distributed_data_parallel_is_looked_into():
    class Wrapper(nn.DataParallel):
        def __init__(self, module):
            nn.Module.__init__(self)
            self.module = module

    model = tiny.TinyArch(None)
    models.serve(Wrapper(model), None)
    try:
        assert models.served(model) and models.served(Wrapper(model)) is models.served(model)
    finally:
        with models.serving():
            pass
    assert not models.served(model)
