"""The peak arithmetic of GPUs: data from their makers' sheets, and how a device is found in it."""

import re

import torch

# Name of the device (a pattern, the first match counts) -> TFLOPS of dense matrix products by type. Sheets that give
# figures "with sparsity" are halved. fp32 is without TF32.
#
#     H100, H200    NVIDIA H100 and H200 data sheets; NVIDIA H100 architecture white paper, table 2
#     A100          NVIDIA A100 data sheet; A30, A10, A40: the data sheets of these
#     L40S, L4      NVIDIA L40S and L4 data sheets
#     V100, T4      NVIDIA V100 and T4 data sheets. Neither has bf16 or TF32 in hardware
PEAK_TFLOPS = [
    (r"H200 NVL", {"fp16": 835.5, "bf16": 835.5, "tf32": 417.7, "fp32": 60.0}),
    (r"H200|GH200", {"fp16": 989.4, "bf16": 989.4, "tf32": 494.7, "fp32": 66.9}),
    (r"H100 NVL", {"fp16": 835.5, "bf16": 835.5, "tf32": 417.7, "fp32": 60.0}),
    (r"H100 PCIe", {"fp16": 756.0, "bf16": 756.0, "tf32": 378.0, "fp32": 51.2}),
    (r"H100", {"fp16": 989.4, "bf16": 989.4, "tf32": 494.7, "fp32": 66.9}),
    (r"A100", {"fp16": 312.0, "bf16": 312.0, "tf32": 156.0, "fp32": 19.5}),
    (r"A30\b", {"fp16": 165.0, "bf16": 165.0, "tf32": 82.0, "fp32": 10.3}),
    (r"A40\b", {"fp16": 149.7, "bf16": 149.7, "tf32": 74.8, "fp32": 37.4}),
    (r"A10\b", {"fp16": 125.0, "bf16": 125.0, "tf32": 62.5, "fp32": 31.2}),
    (r"L40S", {"fp16": 362.0, "bf16": 362.0, "tf32": 183.0, "fp32": 91.6}),
    (r"L4\b", {"fp16": 121.0, "bf16": 121.0, "tf32": 60.0, "fp32": 30.3}),
    (r"V100-SXM", {"fp16": 125.0, "fp32": 15.7}),
    (r"V100-PCIE", {"fp16": 112.0, "fp32": 14.0}),
    (r"\bT4\b", {"fp16": 65.0, "fp32": 8.1}),
]


def peak_flops(device, precision):
    """Operations per second that a device can do at most in a precision, or None where that is not known.

    Args:
        device (torch.device):
        precision (str): "off" and "fp32" count as what the TF32 switches make of them.
    """
    if device.type != "cuda":
        return None
    if precision == "off":
        precision = "tf32" if torch.backends.cudnn.allow_tf32 else "fp32"
    return lookup(torch.cuda.get_device_name(device), precision)


def lookup(name, precision):
    """As `peak_flops`, by the name of the device. A slice of a GPU (MIG) has a peak that is not in the table."""
    if "MIG" in name:
        return None
    peaks = next((peaks for pattern, peaks in PEAK_TFLOPS if re.search(pattern, name)), {})
    if precision == "tf32" and "tf32" not in peaks:
        precision = "fp32"
    return peaks[precision] * 1e12 if precision in peaks else None
