"""How single operators of Detectron2 are kept in fp32: functions that take a method and give the shielded one.

Each leaves fp32 tensors outside autocast to the stock method, so that the fp32 path is not changed.
"""

import functools

import torch
from torch.autograd.function import once_differentiable

from .island import active_autocast, autocast_off, fp32_island, upcast

_LOW = (torch.float16, torch.bfloat16)


def island(method):
    """Arguments are cast up, autocast is off, outputs are fp32."""

    @functools.wraps(method)
    def in_fp32(self, *args, **kwargs):
        return fp32_island(functools.partial(method, self))(*args, **kwargs)

    return in_fp32


def island_like_input(method):
    """An island whose outputs get the dtype of the first argument back."""
    in_fp32 = island(method)

    @functools.wraps(method)
    def like_input(self, first, *args, **kwargs):
        output = in_fp32(self, first, *args, **kwargs)
        return output.to(first.dtype) if first.dtype in _LOW else output

    return like_input


def fp32_outputs(method):
    """Runs as it is; its outputs are fp32, and so is what the stock code computes from them."""

    @functools.wraps(method)
    def outputs_cast_up(self, *args, **kwargs):
        return upcast(method(self, *args, **kwargs))

    return outputs_cast_up


def roi_align(method):
    """ROIAlign.forward: box coordinates are not rounded to the type of the features.

    torchvision computes in fp32 under autocast, and has no bf16 kernel outside; here it is cast in either case.
    """

    @functools.wraps(method)
    def forward(self, input, rois):
        if input.dtype not in _LOW:
            return method(self, input, rois)
        with autocast_off(active_autocast(input)):
            return method(self, input.float(), rois.float()).to(input.dtype)

    return forward


def frozen_batch_norm(method):
    """FrozenBatchNorm2d.forward: the folded scale and bias stay fp32, and the output is rounded once."""

    @functools.wraps(method)
    def forward(self, x):
        if x.dtype not in _LOW:
            return method(self, x)
        scale = self.weight.float() * (self.running_var.float() + self.eps).rsqrt()
        bias = self.bias.float() - self.running_mean.float() * scale
        return _Affine.apply(x, scale.reshape(1, -1, 1, 1), bias.reshape(1, -1, 1, 1))

    return forward


class _Affine(torch.autograd.Function):
    """x * scale + bias of a 16-bit x with fp32 constants, in fp32, without an fp32 copy of x that lives on."""

    @staticmethod
    def forward(ctx, x, scale, bias):
        ctx.save_for_backward(scale)
        return (x.float() * scale).add_(bias).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (scale,) = ctx.saved_tensors
        return (gradient.float() * scale).to(gradient.dtype), None, None
