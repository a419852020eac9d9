import builtins

import pytest
import torch

from d2amp_ext import _compat


@pytest.fixture(autouse=True)
def _fresh():
    _compat.native_precisions.cache_clear()
    yield
    _compat.native_precisions.cache_clear()


def cuda(monkeypatch, capability, bf16, hip=None):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: bf16)
    monkeypatch.setattr(torch.version, "hip", hip)


@pytest.mark.parametrize(
    "name, capability, bf16, native, runnable",
    [
        ("Maxwell", (5, 2), True, set(), {"fp16", "bf16"}),
        ("V100", (7, 0), True, {"fp16"}, {"fp16", "bf16"}),
        ("T4 that does not emulate", (7, 5), False, {"fp16"}, {"fp16"}),
        ("A100", (8, 0), True, {"fp16", "bf16", "tf32"}, {"fp16", "bf16", "tf32"}),
        ("H100", (9, 0), True, {"fp16", "bf16", "tf32"}, {"fp16", "bf16", "tf32"}),
    ],
)
def test_cuda_devices(monkeypatch, name, capability, bf16, native, runnable):
    cuda(monkeypatch, capability, bf16)
    assert _compat.native_precisions("cuda") == (native, runnable)


def test_rocm(monkeypatch):
    cuda(monkeypatch, (9, 0), True, hip="6.0")
    assert _compat.native_precisions("cuda")[0] == {"fp16", "bf16"}


def test_no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _compat.native_precisions("cuda") == (set(), set())


@pytest.mark.parametrize(
    "machine, capabilities, native",
    [
        ("x86_64", {"avx512_bf16": True}, {"bf16"}),
        ("x86_64", {"amx_bf16": True, "avx512_fp16": True}, {"bf16", "fp16"}),
        ("AMD64", {"avx2": True}, set()),
    ],
)
def test_processors(monkeypatch, machine, capabilities, native):
    monkeypatch.setattr(_compat.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    for name in ("_is_avx512_bf16_supported", "_is_amx_fp16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False, raising=False)
    assert _compat.native_precisions("cpu") == (native, {"fp16", "bf16"})


def test_mps_and_devices_nobody_knows(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert _compat.native_precisions("mps") == ({"fp16"}, {"fp16", "bf16"})
    assert _compat.native_precisions("abacus") == (set(), set())


@pytest.mark.parametrize(
    "missing, command",
    [
        ("torch", "d2amp setup"),
        ("detectron2.engine", "d2amp setup"),
        ("cv2", "d2amp setup"),
        ("lightning", 'pip install "d2amp-ext[lightning]"'),
        ("PIL", "pip install Pillow"),
        ("fvcore", "pip install fvcore"),
    ],
)
def test_what_is_missing_and_what_to_type(missing, command):
    error = _compat.missing_package_error("d2amp_ext.AMPTrainer", ModuleNotFoundError(f"No module named {missing!r}", name=missing))
    assert isinstance(error, ImportError)
    assert "d2amp_ext.AMPTrainer" in str(error) and missing.split(".")[0] in str(error) and command in str(error)


def test_an_old_torch_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.3.1")
    with pytest.raises(ImportError, match="torch >= 2.4, found 2.3.1.*d2amp setup"):
        _compat.check_torch()
    monkeypatch.setattr(torch, "__version__", "2.4.0a0+git123")
    _compat.check_torch()


def test_supported_kwargs():
    given = {"a": 1, "b": 2}
    assert _compat.supported_kwargs(lambda a: None, given) == {"a": 1}
    assert _compat.supported_kwargs(lambda **rest: None, given) == given


def test_compiled_ops_are_looked_for(monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "detectron2._C" or (name == "detectron2" and args and "_C" in (args[2] or ())):
            raise ImportError("no compiled module")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert _compat.has_compiled_ops() is False


def test_norms_of_every_dtype():
    tensors = [torch.full((4,), 300.0, dtype=torch.float16), torch.ones(9, dtype=torch.float64), torch.ones(4)]
    norms = _compat.gradient_norms(tensors)
    assert [norm.dtype for norm in norms] == [torch.float32] * 3
    assert [norm.item() for norm in norms] == [600.0, 3.0, 2.0]


def test_an_older_storage_that_takes_no_iteration():
    class Storage:
        iter = 9
        seen = []

        def put_scalar(self, name, value):
            self.seen.append((name, value, self.iter))

    storage = Storage()
    _compat.put_scalar(storage, "loss", 1.0, 4)
    assert storage.seen == [("loss", 1.0, 4)] and storage.iter == 9
