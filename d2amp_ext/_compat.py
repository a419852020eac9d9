"""Every question about a version of torch or Detectron2 is asked here.

What a feature needs:

    all of the package              torch >= 2.4 (torch.amp.GradScaler with a device type, is_autocast_available)
    bf16 on MPS                     torch >= 2.6
    after_backward hooks            Detectron2 with HookBase.after_backward (March 2023); older ones never call them
    gather_metric_period etc.       Detectron2 whose SimpleTrainer takes them; this package's AMPTrainer has them itself
    the optimizer in checkpoints    DefaultTrainer.state_dict (November 2021); for older ones the mixin adds it
    metrics of earlier iterations   EventStorage.put_scalar with cur_iter (April 2023); older ones are told the iteration

Detectron2's version string says 0.6 for the release of 2021 and for today's main, so features are found by signature.
torch and Detectron2 are imported inside the functions: the module itself needs neither.
"""

import contextlib
import functools
import inspect
import platform

MIN_TORCH = (2, 4)
MIN_LIGHTNING, NO_LIGHTNING = (2, 4), (2, 7)
SETUP_COMMAND = "d2amp setup"

_DISTRIBUTIONS = {"PIL": "Pillow", "yaml": "PyYAML"}
_EXTRAS = {"lightning": "lightning", "pytorch_lightning": "lightning", "faster_coco_eval": "coco"}


def missing_package_error(name, error):
    """The ImportError to raise when `name` needs a package that is not there, with the command that installs it."""
    missing = (error.name or "").split(".")[0]
    if missing in ("torch", "torchvision", "detectron2", "cv2"):
        command = f"{SETUP_COMMAND}   (or: python -m d2amp_ext.setup_detectron2)"
    elif missing in _EXTRAS:
        command = f'pip install "d2amp-ext[{_EXTRAS[missing]}]"'
    else:
        command = f"pip install {_DISTRIBUTIONS.get(missing, missing) or '<package>'}"
    return ImportError(f"{name} needs {missing or 'a package'}, which is not installed ({error}). Type: {command}")


def torch_version():
    """(major, minor) of the installed torch."""
    import torch

    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def check_torch():
    """Raises ImportError when torch is older than MIN_TORCH."""
    if torch_version() < MIN_TORCH:
        import torch

        least = ".".join(map(str, MIN_TORCH))
        raise ImportError(f"d2amp_ext needs torch >= {least}, found {torch.__version__}. Type: {SETUP_COMMAND}")


def check_lightning():
    """Raises ImportError when the installed Lightning is not one of those that this package knows.

    Raises:
        ModuleNotFoundError: when there is none.
    """
    import lightning

    if not MIN_LIGHTNING <= tuple(int(part) for part in lightning.__version__.split(".")[:2]) < NO_LIGHTNING:
        least, end = (".".join(map(str, version)) for version in (MIN_LIGHTNING, NO_LIGHTNING))
        raise ImportError(
            f"d2amp_ext.lightning needs lightning >= {least} and < {end}, found {lightning.__version__}. "
            'Type: pip install "d2amp-ext[lightning]"'
        )


def repeats_last_batch():
    """Whether Lightning takes the batch after which a checkpoint was written for one that is still to come (2.4)."""
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

    return not hasattr(_TrainingEpochLoop, "update_restart_stage")


def supported_kwargs(function, kwargs):
    """The entries of `kwargs` that `function` takes."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(kwargs)
    return {name: value for name, value in kwargs.items() if name in parameters}


def saves_inner_trainer():
    """Whether Detectron2's DefaultTrainer puts the state of its inner trainer, and so the optimizer's, in checkpoints."""
    from detectron2.engine import DefaultTrainer

    return "state_dict" in vars(DefaultTrainer)


def put_scalar(storage, name, value, iteration):
    """Writes a scalar of an iteration that may lie behind to an EventStorage."""
    if _takes_cur_iter(type(storage)):
        storage.put_scalar(name, value, cur_iter=iteration)
        return
    now, storage.iter = storage.iter, iteration
    try:
        storage.put_scalar(name, value)
    finally:
        storage.iter = now


@functools.lru_cache(maxsize=None)
def _takes_cur_iter(storage_class):
    return bool(supported_kwargs(storage_class.put_scalar, {"cur_iter": 0}))


def has_compiled_ops():
    """Whether Detectron2's compiled module (rotated boxes, deformable convolution, fast COCO evaluation) loads."""
    try:
        import detectron2._C  # noqa: F401
    except ImportError:
        return False
    return True


def autocast_available(device_type):
    """Whether torch.autocast knows this type of device."""
    import torch

    return torch.amp.is_autocast_available(device_type)


@functools.lru_cache(maxsize=None)
def native_precisions(device_type, index=None):
    """Which of fp16, bf16 and tf32 a device computes in hardware, and which it can run at all.

    Args:
        device_type (str): "cpu", "cuda", "xpu", "mps" ...
        index (int or None): which of several; None is the current one.

    Returns:
        (frozenset, frozenset): native, and runnable (native or emulated).
    """
    query = {"cpu": _cpu, "cuda": _cuda, "xpu": _xpu, "mps": _mps}.get(device_type)
    if query is None:
        return frozenset(), frozenset()
    native, runnable = query(index)
    return frozenset(native), frozenset(runnable | native)


def _cpu(index):
    import torch

    def cpu_has(*names):
        capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # newer than the _is_..._supported functions
        return any(capabilities.get(name) or getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in names)

    native = set()
    if platform.machine().lower() in ("x86_64", "amd64"):
        if cpu_has("avx512_bf16", "amx_bf16"):
            native.add("bf16")
        if cpu_has("amx_fp16"):  # AVX512-FP16 alone leaves torch's fp16 many times slower than its fp32
            native.add("fp16")
    elif torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        native.add("bf16")
    return native, {"fp16", "bf16"}


def _cuda(index):
    import torch

    if not torch.cuda.is_available():
        return set(), set()
    if torch.version.hip:
        native = {"fp16"} | ({"bf16"} if torch.cuda.is_bf16_supported() else set())
        return native, {"fp16", "bf16"}
    capability = torch.cuda.get_device_capability(index)
    native = {"fp16"} if capability >= (5, 3) else set()
    if capability >= (8, 0):
        native |= {"bf16", "tf32"}
    return native, {"fp16"} | ({"bf16"} if torch.cuda.is_bf16_supported() else set())


def _xpu(index):
    import torch

    available = hasattr(torch, "xpu") and torch.xpu.is_available()
    return ({"fp16", "bf16"} if available else set()), set()


def _mps(index):
    import torch

    if not torch.backends.mps.is_available():
        return set(), set()
    return {"fp16"}, ({"bf16"} if torch_version() >= (2, 6) else set())


def has_fp8(index=None):
    """Whether a GPU multiplies fp8 matrices in hardware. Nothing in this package uses it."""
    import torch

    if not torch.cuda.is_available():
        return False
    if torch.version.hip:
        return getattr(torch.cuda.get_device_properties(index), "gcnArchName", "").startswith(("gfx94", "gfx95", "gfx12"))
    return torch.cuda.get_device_capability(index) >= (8, 9)


def tf32_state():
    """What `tf32_switches` sets, as it is now."""
    import torch

    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


@contextlib.contextmanager
def tf32_switches(use_tf32):
    """A context in which fp32 matmuls and convolutions may use TF32, or not. The former state comes back at the end."""
    import torch

    # These two switches, unlike the newer fp32_precision ones, leave every getter of torch readable.
    before = tf32_state()
    try:
        torch.set_float32_matmul_precision("high" if use_tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = use_tf32
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def gradient_norms(gradients):
    """The L2 norm of each tensor, as fp32 scalars on the tensors' own devices."""
    import torch

    if all(gradient.dtype is torch.float32 for gradient in gradients):
        return list(torch._foreach_norm(gradients))  # in one call; torch.nn.utils.clip_grad_norm_ relies on it too
    # 16-bit squares overflow, and 64-bit tensors refuse a narrower dtype.
    return [torch.linalg.vector_norm(g.float() if g.dtype.itemsize < 4 else g).float() for g in gradients]
