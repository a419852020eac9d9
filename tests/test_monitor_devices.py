"""The peak of a device, by its name."""

import pytest
import torch

from d2amp_ext.monitor import devices
from d2amp_ext.monitor.devices import PEAK_TFLOPS, lookup, peak_flops


@pytest.mark.parametrize(
    "name, precision, tflops",
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA H100 80GB HBM3", "fp16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156.0),
        ("NVIDIA A10", "bf16", 125.0),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA L4", "fp16", 121.0),
        ("NVIDIA L40S", "fp16", 362.0),
        ("NVIDIA L40", "fp16", None),
        ("Tesla V100-SXM2-16GB", "fp16", 125.0),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("Tesla V100-SXM2-16GB", "tf32", 15.7),
        ("Tesla T4", "fp32", 8.1),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("Some other GPU", "fp32", None),
    ],
)
def test_lookup(name, precision, tflops):
    assert lookup(name, precision) == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_a_cpu_has_no_peak():
    assert peak_flops(torch.device("cpu"), "fp32") is None


@pytest.mark.parametrize("tf32, tflops", [(True, 494.7), (False, 66.9)])
def test_a_run_without_amp_is_measured_by_the_switches_of_torch(monkeypatch, tf32, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(devices.torch.backends.cudnn, "allow_tf32", tf32)
    assert peak_flops(torch.device("cuda"), "off") == pytest.approx(tflops * 1e12)


def test_the_table_is_plausible():
    for _, peaks in PEAK_TFLOPS:
        assert peaks["fp16"] > peaks["fp32"] and peaks.get("bf16", peaks["fp16"]) == peaks["fp16"]
        if "tf32" in peaks:
            assert peaks["fp32"] <= peaks["tf32"] < peaks["fp16"]
