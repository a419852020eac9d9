"""Questions about torch, devices and Detectron2, each asked with the answers that other machines would give."""

import builtins
import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from detectron2.utils.events import EventStorage

from d2amp_ext import PrecisionPolicy, UserError, _compat, policy

BOTH, ALL = {"fp16", "bf16"}, {"fp16", "bf16", "tf32"}


@pytest.fixture(autouse=True)
def _fresh():
    _compat.native_precisions.cache_clear()
    policy.warn_once.cache_clear()
    yield
    _compat.native_precisions.cache_clear()
    policy.warn_once.cache_clear()


def pretend_cuda(monkeypatch, capability=(8, 0), bf16=True, hip=None, available=True):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: bf16)
    monkeypatch.setattr(torch.version, "hip", hip)


# Name, capability, whether torch.cuda.is_bf16_supported() (also by emulation), native, runnable, what `auto` is.
GPUS = [
    ("Maxwell", (5, 2), False, set(), {"fp16"}, "fp32"),
    ("Pascal P100", (6, 0), False, {"fp16"}, {"fp16"}, "fp16"),
    ("V100", (7, 0), True, {"fp16"}, BOTH, "fp16"),
    ("V100, torch that does not emulate", (7, 0), False, {"fp16"}, {"fp16"}, "fp16"),
    ("T4", (7, 5), True, {"fp16"}, BOTH, "fp16"),
    ("A100", (8, 0), True, ALL, ALL, "bf16"),
    ("RTX 3090", (8, 6), True, ALL, ALL, "bf16"),
    ("L4", (8, 9), True, ALL, ALL, "bf16"),
    ("H100", (9, 0), True, ALL, ALL, "bf16"),
    ("B200", (10, 0), True, ALL, ALL, "bf16"),
]


@pytest.mark.parametrize("name, capability, bf16, native, runnable, auto", GPUS, ids=[gpu[0] for gpu in GPUS])
def test_nvidia_gpus(monkeypatch, name, capability, bf16, native, runnable, auto):
    pretend_cuda(monkeypatch, capability, bf16)
    assert _compat.native_precisions("cuda") == (native, runnable)
    resolved = PrecisionPolicy().resolve("cuda")
    assert resolved.precision == auto and resolved.reason.startswith("auto: ")


@pytest.mark.parametrize("name, capability, bf16, native, runnable, auto", GPUS, ids=[gpu[0] for gpu in GPUS])
def test_an_explicit_choice_on_them_runs_as_it_is_or_is_refused(monkeypatch, caplog, name, capability, bf16, native, runnable, auto):
    pretend_cuda(monkeypatch, capability, bf16)
    for precision in ("bf16", "fp16"):
        caplog.clear()
        if precision not in runnable:
            with pytest.raises(UserError, match=f"'{precision}': cuda cannot run it. Choose .*or auto"):
                PrecisionPolicy(precision).resolve("cuda")
            continue
        assert PrecisionPolicy(precision).resolve("cuda").precision == precision
        warned = any("emulates it" in record.getMessage() for record in caplog.records)
        assert warned == (precision not in native)
    assert PrecisionPolicy("fp32").resolve("cuda").precision == "fp32"
    caplog.clear()
    assert PrecisionPolicy("tf32").resolve("cuda").precision == "tf32"
    assert ("no TF32" in caplog.text) == ("tf32" not in native)


@pytest.mark.parametrize("bf16, native, auto", [(True, BOTH, "bf16"), (False, {"fp16"}, "fp16")])
def test_rocm(monkeypatch, bf16, native, auto):
    """A capability of (9, 0) is a gfx90a there, and no TF32 comes from it."""
    pretend_cuda(monkeypatch, (9, 0), bf16, hip="6.2")
    assert _compat.native_precisions("cuda") == (native, BOTH)
    assert PrecisionPolicy().resolve("cuda").precision == auto


def test_no_cuda(monkeypatch):
    pretend_cuda(monkeypatch, available=False)
    assert _compat.native_precisions("cuda") == (set(), set())
    for precision in ("bf16", "fp16"):
        with pytest.raises(UserError, match="cannot run it. Choose fp32"):
            PrecisionPolicy(precision).resolve("cuda")


def test_one_of_several_gpus(monkeypatch):
    pretend_cuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (7, 0) if index == 1 else (8, 0))
    assert PrecisionPolicy().resolve("cuda:0").precision == "bf16"
    assert PrecisionPolicy().resolve("cuda:1").precision == "fp16"


@pytest.mark.parametrize("available, native", [(True, BOTH), (False, set())])
def test_xpu(monkeypatch, available, native):
    monkeypatch.setattr(torch.xpu, "is_available", lambda: available)
    assert _compat.native_precisions("xpu") == (native, native)


def test_a_torch_without_xpu(monkeypatch):
    monkeypatch.delattr(torch, "xpu")
    assert _compat.native_precisions("xpu") == (set(), set())


@pytest.mark.parametrize(
    "available, version, native, runnable",
    [(True, (2, 4), {"fp16"}, {"fp16"}), (True, (2, 6), {"fp16"}, BOTH), (True, (3, 0), {"fp16"}, BOTH), (False, (2, 6), set(), set())],
)
def test_mps(monkeypatch, available, version, native, runnable):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: available)
    monkeypatch.setattr(_compat, "torch_version", lambda: version)
    assert _compat.native_precisions("mps") == (native, runnable)


@pytest.mark.parametrize("kind", ["abacus", "meta", "hpu"])
def test_devices_that_nobody_knows_run_fp32(kind):
    assert _compat.native_precisions(kind) == (set(), set())


@pytest.mark.parametrize(
    "machine, capabilities, native",
    [
        ("x86_64", {}, set()),
        ("x86_64", {"avx512_bf16": True}, {"bf16"}),
        ("AMD64", {"amx_bf16": True}, {"bf16"}),
        ("x86_64", {"avx512_fp16": True, "avx512_bf16": False}, set()),
        ("AMD64", {"amx_bf16": True, "amx_fp16": True}, BOTH),
        ("x86_64", {"avx2": True, "avx512_f": True, "amx_tile": True}, set()),
    ],
)
def test_x86_processors(monkeypatch, machine, capabilities, native):
    monkeypatch.setattr(_compat.platform, "machine", lambda: machine)
    for name in ("avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16"):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda: False, raising=False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert _compat.native_precisions("cpu") == (native, BOTH)  # emulated, where it is not native
    # An older torch answers by functions, some of which are not there.
    _compat.native_precisions.cache_clear()
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    for name, value in capabilities.items():
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda value=value: value, raising=False)
    monkeypatch.delattr(torch.cpu, "_is_amx_fp16_supported")
    expected = native - {"fp16"} if "amx_fp16" in capabilities else native
    assert _compat.native_precisions("cpu") == (expected, BOTH)


@pytest.mark.parametrize("mkldnn, bf16, native", [(True, True, {"bf16"}), (True, False, set()), (False, True, set())])
def test_arm_processors(monkeypatch, mkldnn, bf16, native):
    monkeypatch.setattr(_compat.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: mkldnn)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: bf16)
    assert _compat.native_precisions("cpu") == (native, BOTH)


def test_this_processor_is_asked_once(monkeypatch):
    first = _compat.native_precisions("cpu")
    monkeypatch.setattr(_compat.platform, "machine", lambda: pytest.fail("asked again"))
    assert _compat.native_precisions("cpu") is first


# What is missing


@pytest.mark.parametrize(
    "missing, command",
    [
        ("torch", "d2amp setup   (or: python -m d2amp_ext.setup_detectron2)"),
        ("torchvision.ops", "d2amp setup"),
        ("detectron2.engine", "d2amp setup"),
        ("cv2", "d2amp setup"),
        ("lightning.pytorch", 'pip install "d2amp-ext[lightning]"'),
        ("pytorch_lightning", 'pip install "d2amp-ext[lightning]"'),
        ("faster_coco_eval", 'pip install "d2amp-ext[coco]"'),
        ("PIL", "pip install Pillow"),
        ("yaml", "pip install PyYAML"),
        ("fvcore.common", "pip install fvcore"),
    ],
)
def test_what_is_missing_and_what_to_type(missing, command):
    cause = ModuleNotFoundError(f"No module named {missing!r}", name=missing)
    error = _compat.missing_package_error("d2amp_ext.AMPTrainer", cause)
    assert type(error) is ImportError
    assert str(error).startswith(f"d2amp_ext.AMPTrainer needs {missing.split('.')[0]}, which is not installed")
    assert str(error).endswith(f"Type: {command}") or command == "d2amp setup" and f"Type: {command} " in str(error)


def test_an_error_without_a_name():
    text = str(_compat.missing_package_error("d2amp_ext.X", ImportError("something broke")))
    assert "d2amp_ext.X needs a package" in text and "something broke" in text and "pip install <package>" in text


@pytest.mark.parametrize(
    "version, good",
    [("2.3.1", False), ("1.13.1+cu117", False), ("2.4.0", True), ("2.4.0a0+git123", True), ("2.10.1", True), ("3.0.0", True)],
)
def test_the_oldest_torch(monkeypatch, version, good):
    monkeypatch.setattr(torch, "__version__", version)
    if good:
        _compat.check_torch()
    else:
        with pytest.raises(ImportError, match=f"needs torch >= 2.4, found {version.split('+')[0]}.*Type: d2amp setup"):
            _compat.check_torch()


def test_compiled_ops_are_looked_for(monkeypatch):
    assert _compat.has_compiled_ops() == (importlib.util.find_spec("detectron2._C") is not None)
    real = builtins.__import__

    def broken(name, *args, **kwargs):  # built for another torch
        if name == "detectron2._C":
            raise ImportError("undefined symbol")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", broken)
    assert _compat.has_compiled_ops() is False


# Features by signature


def test_supported_kwargs():
    class Takes:
        def __init__(self, model, gather_metric_period=1, *, log=False):
            pass

    class TakesAll(Takes):
        def __init__(self, *args, **kwargs):
            pass

    given = {"gather_metric_period": 5, "log": True, "async_write_metrics": True}
    assert _compat.supported_kwargs(Takes.__init__, given) == {"gather_metric_period": 5, "log": True}
    assert _compat.supported_kwargs(Takes, given) == {"gather_metric_period": 5, "log": True}
    assert _compat.supported_kwargs(TakesAll, given) == given and _compat.supported_kwargs(TakesAll, given) is not given
    assert _compat.supported_kwargs(lambda: None, given) == {}
    assert _compat.supported_kwargs(lambda log, **rest: None, given) == given


def test_scalars_of_earlier_iterations():
    class Older(EventStorage):
        def put_scalar(self, name, value, smoothing_hint=True):
            super().put_scalar(name, value, smoothing_hint)

    for storage in (EventStorage(0), Older(0)):
        storage.iter = 9
        _compat.put_scalar(storage, "loss", 1.5, 4)
        assert storage.history("loss").values() == [(1.5, 4)] and storage.iter == 9


def test_norms_of_every_dtype():
    """Found: a model with a float64 parameter died in its first step."""
    tensors = [torch.full((4,), 300.0, dtype=torch.float16), torch.full((4,), 1e15, dtype=torch.bfloat16),
               torch.ones(9, dtype=torch.float64), torch.full((4,), 3 + 4j, dtype=torch.complex64), torch.ones(4)]  # fmt: skip
    norms = _compat.gradient_norms(tensors)
    assert [norm.dtype for norm in norms] == [torch.float32] * 5 and all(norm.dim() == 0 for norm in norms)
    torch.testing.assert_close(torch.stack(norms), torch.tensor([600.0, 2e15, 3.0, 10.0, 2.0]), rtol=1e-2, atol=0)
    assert [norm.item() for norm in _compat.gradient_norms([torch.ones(4), torch.zeros(0), torch.tensor(-2.0)])] == [2, 0, 2]


def test_the_switches_of_tf32_come_back_even_after_an_error():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    for use in (True, False):
        with pytest.raises(RuntimeError, match="inside"), _compat.tf32_switches(use):
            assert torch.get_float32_matmul_precision() == ("high" if use else "highest")
            assert torch.backends.cudnn.allow_tf32 is use
            raise RuntimeError("inside")
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


# An older Detectron2: what it lacks is taken away from the one that is installed, before the package is imported.

OLDER = """
import sys
sys.path[:0] = [ROOT, ROOT + "/tests"]
import detectron2.engine as engine
from detectron2.engine.train_loop import HookBase, TrainerBase
from detectron2.utils import events

def simple_trainer(self, model, data_loader, optimizer):
    TrainerBase.__init__(self)
    model.train()
    self.model, self.data_loader, self.optimizer, self._data_loader_iter_obj = model, data_loader, optimizer, None

def amp_trainer(self, model, data_loader, optimizer, grad_scaler=None):
    engine.SimpleTrainer.__init__(self, model, data_loader, optimizer)
    self.grad_scaler = grad_scaler

def put_scalar(self, name, value, smoothing_hint=True, new=events.EventStorage.put_scalar):
    new(self, name, value, smoothing_hint)

def put_scalars(self, *, smoothing_hint=True, **scalars):
    for name, value in scalars.items():
        self.put_scalar(name, value, smoothing_hint)

del HookBase.after_backward, TrainerBase.after_backward  # March 2023
engine.SimpleTrainer.__init__ = simple_trainer           # February 2023: gather_metric_period ...
engine.AMPTrainer.__init__ = amp_trainer                 # November 2022: precision; March 2023: log_grad_scaler
engine.SimpleTrainer.after_train = TrainerBase.after_train
events.EventStorage.put_scalar = put_scalar              # April 2023: cur_iter
events.EventStorage.put_scalars = put_scalars
del engine.DefaultTrainer.state_dict, engine.DefaultTrainer.load_state_dict  # November 2021
"""


def run_on_older(code, tmp_path, **env):
    script = tmp_path / "script.py"
    script.write_text(f"ROOT = {str(ROOT)!r}\n{OLDER}\n{code}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run([sys.executable, "-W", "ignore", str(script)], cwd=tmp_path, env=environment, capture_output=True,
                          text=True, timeout=200)  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def test_our_trainer_trains_on_an_older_detectron2(tmp_path):
    code = """
import inspect, torch
from conftest import TinyModel, tiny_data
from d2amp_ext import AMPTrainer, PrecisionPolicy, ScalerOptions
assert "gather_metric_period" not in inspect.signature(engine.AMPTrainer).parameters
assert not hasattr(HookBase, "after_backward") and not hasattr(AMPTrainer, "after_backward")

def plain(steps):
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for batch in tiny_data()[:steps]:
        optimizer.zero_grad()
        loss = sum(model(batch).values())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses

class Hook(engine.HookBase):
    steps = []
    def after_step(self):
        self.steps.append(self.trainer.last_step.iteration)

def ours(precision, steps=12, data=None, **options):
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    policy = PrecisionPolicy(precision, scaler=ScalerOptions(init_scale=16.0))
    trainer = AMPTrainer(model, data or tiny_data(), optimizer, policy=policy, **options)
    trainer.register_hooks([Hook()])
    trainer.train(0, steps)
    return trainer

reference, losses = plain(12)
for options in ({}, {"gather_metric_period": 5, "zero_grad_before_forward": True}):
    trainer = ours("fp32", **options)
    found = trainer.storage.history("total_loss").values()
    assert [iteration for _, iteration in found] == list(range(12))
    assert max(abs(value - loss) for (value, _), loss in zip(found, losses)) < 1e-6
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), reference.parameters()))
assert Hook.steps == [*range(12)] * 2

for precision in ("bf16", "fp16"):
    trainer = ours(precision, data=tiny_data(40, spoil={3, 4}), log_grad_scaler=True, gather_metric_period=4)
    assert trainer.last_step.skips == 2 and all(p.isfinite().all() for p in trainer.model.parameters())
    scales = dict((i, v) for v, i in trainer.storage.history("[metric]grad_scaler").values())
    assert scales[0] == (16.0 if precision == "fp16" else 1.0) and len(scales) == 12
halves = [[{"x": part}] for batch in tiny_data() for part in batch[0]["x"].split(2)]
trainer = ours("fp32", data=halves, accumulate_steps=2)
for a, b in zip(trainer.model.parameters(), reference.parameters()):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

state = ours("fp16", steps=6).state_dict()
again = AMPTrainer(TinyModel(), tiny_data(), torch.optim.SGD(TinyModel().parameters(), 0.05, momentum=0.9), policy=PrecisionPolicy("fp16"))
again.load_state_dict(state)
assert again.iter == 6 and again.grad_scaler.get_scale() == state["grad_scaler"]["scale"]
"""
    run_on_older(code, tmp_path)


def test_a_run_on_an_older_detectron2_resumes_with_its_optimizer(tmp_path, datasets_dir):
    """Found: DefaultTrainer of before November 2021 left the optimizer out of checkpoints, and ours did so with it."""
    code = """
import torch
from detectron2.utils.env import seed_all_rng
from d2amp_ext import PrecisionTrainer, load_cfg
assert "state_dict" not in vars(engine.DefaultTrainer)

class Stop(engine.HookBase):
    def after_step(self):
        if self.trainer.iter == 2:
            raise KeyboardInterrupt

def run(folder, resume=False, hooks=()):
    cfg = load_cfg("quick/faster_rcnn_micro.yaml", ["MODEL.DEVICE", "cpu", "OUTPUT_DIR", folder, "SEED", "3", "SOLVER.MAX_ITER", 4,
                   "SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION", "fp32", "DATASETS.TEST", "()", "TEST.EVAL_PERIOD", "0",
                   "SOLVER.CHECKPOINT_PERIOD", "2", "DATALOADER.NUM_WORKERS", "0", "SOLVER.STEPS", "()"])
    seed_all_rng(3)
    trainer = PrecisionTrainer(cfg)
    trainer.register_hooks(hooks)
    trainer.resume_or_load(resume)
    trainer.train()
    return trainer

whole = run("a")
try:
    run("b", hooks=[Stop()])
except KeyboardInterrupt:
    pass
resumed = run("b", resume=True)
assert resumed.start_iter == 2
a, b = whole.model.state_dict(), resumed.model.state_dict()
assert all(torch.equal(a[name], b[name]) for name in a)
assert torch.load("b/model_final.pth", weights_only=True)["trainer"]["_trainer"]["optimizer"]["state"]
"""
    run_on_older(code, tmp_path, DETECTRON2_DATASETS=str(datasets_dir))
