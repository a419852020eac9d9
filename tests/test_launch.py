"""Two ranks on the CPU: they step and skip together, and both launchers give the same run."""

import json
import tempfile
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import ROOT, TinyModel, tiny_data
from detectron2.utils.events import EventStorage
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from d2amp_ext import AMPTrainer, PrecisionPolicy, ScalerOptions, UserError
from d2amp_ext.launch import choose_device, launch, local_processes, world_size


class Diverging(TinyModel):
    """Raises inside the forward like Detectron2's RPN when a sample says so."""

    def forward(self, batch):
        if batch[0].get("spoil") == "raise":
            raise FloatingPointError("Predicted boxes or scores contain Inf/NaN.")
        return super().forward(batch)


CASES = {
    "loss": {"how": "loss", "precision": "fp16", "spoil": [2, 3, 6]},
    "forward": {"how": "forward", "precision": "fp16", "spoil": [2, 3, 6]},
    "hook": {"how": "hook", "precision": "bf16", "spoil": [2, 3, 6]},
    "raise": {"how": "forward", "precision": "fp16", "spoil": [3], "options": {"nonfinite": "raise"}},
    "whole": {"how": "none", "precision": "fp32", "size": 4},
    "halves": {"how": "none", "precision": "fp32", "size": 2, "window": 2},
    "window": {"how": "forward", "precision": "bf16", "spoil": [4, 9], "window": 2},
}


def worker(rank, folder):
    """Runs every case on one of two ranks; starting processes is what takes time."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.save({name: run_case(rank, **case) for name, case in CASES.items()}, f"{folder}/rank{rank}.pth")
    dist.destroy_process_group()


def batches(rank, how, spoil, size):
    if how == "none":  # the samples of 16 batches of 4, split over ranks and then into batches of `size`
        return [[{"x": part}] for batch in tiny_data(16)[rank::2] for part in batch[0]["x"].split(size)]
    factor = "raise" if how == "forward" else float("inf")
    return tiny_data(24, spoil if rank == 1 and how != "hook" else (), factor)


def run_case(rank, how, precision, spoil=(), window=1, size=4, options=None):
    model = DistributedDataParallel(Diverging())
    reductions = []

    def count(state, bucket):
        reductions.append(1)
        return allreduce_hook(None, bucket)

    model.register_comm_hook(None, count)
    policy = PrecisionPolicy(precision, scaler=ScalerOptions(init_scale=64.0), **(options or {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trainer = AMPTrainer(model, batches(rank, how, spoil, size), optimizer, policy=policy, accumulate_steps=window)

    def spoil_gradient():
        if rank == 1 and trainer.iter in spoil:
            next(model.parameters()).grad.fill_(float("nan"))

    if how == "hook":
        trainer.after_backward = spoil_gradient
    causes, error = [], None
    with EventStorage(0) as trainer.storage:
        for trainer.iter in range(8):
            trainer.storage.iter = trainer.iter
            try:
                trainer.run_step()
            except FloatingPointError as caught:
                error = str(caught)
                break
            finally:
                causes.append(trainer.last_step and trainer.last_step.cause)
        histories = trainer.storage.histories()
    return {
        "causes": causes,
        "scale": trainer.grad_scaler.get_scale(),
        "weights": [p.detach() for p in model.module.parameters()],
        "reductions": len(reductions),
        "error": error,
        "losses": [value for value, _ in histories["total_loss"].values()] if rank == 0 else None,
    }


@pytest.fixture(scope="module")
def ranks():
    """The results of all cases, a dict for each of the two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(worker, args=(folder,), nprocs=2, start_method="spawn")
        return [torch.load(f"{folder}/rank{rank}.pth") for rank in range(2)]


@pytest.mark.parametrize("name, cause", [("loss", "loss"), ("forward", "forward"), ("hook", "gradient")])
def test_two_ranks_skip_together_when_one_is_not_finite(ranks, name, cause):
    first, second = (rank[name] for rank in ranks)
    assert first["causes"] == second["causes"] == [None, None, cause, cause, None, None, cause, None]
    assert first["scale"] == second["scale"] == (8.0 if CASES[name]["precision"] == "fp16" else 1.0)
    for a, b in zip(first["weights"], second["weights"]):
        assert torch.equal(a, b) and a.isfinite().all()


def test_both_ranks_give_up_in_the_same_step(ranks):
    first, second = (rank["raise"] for rank in ranks)
    assert first["causes"] == second["causes"] == [None, None, None, "forward"]
    assert "NONFINITE" in first["error"] and "NONFINITE" in second["error"]


def test_a_window_reduces_once_and_equals_the_larger_batch(ranks):
    whole, halves = ranks[0]["whole"], ranks[0]["halves"]
    assert whole["reductions"] == halves["reductions"] == 8  # and not 16
    for a, b, other_rank in zip(whole["weights"], halves["weights"], ranks[1]["halves"]["weights"]):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert torch.equal(b, other_rank)
    assert halves["losses"] == pytest.approx(whole["losses"], rel=1e-5)


def test_a_window_skipped_in_its_first_micro_batch_leaves_ddp_usable(ranks):
    first, second = (rank["window"] for rank in ranks)
    assert first["causes"] == second["causes"] == [None, None, "forward", None, "forward", None, None, None]


TINY = ["--config-file", "quick/faster_rcnn_micro.yaml", "SEED", "3", "SOLVER.AMP.ENABLED", "True", "SOLVER.MAX_ITER", "6",
        "SOLVER.AMP.PRECISION", "fp32", "TEST.EVAL_PERIOD", "0", "MONITOR.PERIOD", "1"]  # fmt: skip


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    return [line["total_loss"] for line in lines if "total_loss" in line]


def test_detectron2s_launcher_and_torchrun_give_the_same_run(run_tool, tmp_path):
    flags = ["--num-gpus", "2", "--dist-url", "auto"]
    run_tool("tools/train_net.py", *flags, *TINY, "OUTPUT_DIR", tmp_path / "a", cwd=tmp_path, check=0)
    run_tool("torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend", "c10d",
             "--rdzv-endpoint", "localhost:0", ROOT / "tools/train_net.py", *TINY,
             "OUTPUT_DIR", tmp_path / "b", cwd=tmp_path, check=0)  # fmt: skip
    assert losses(tmp_path / "a") == losses(tmp_path / "b") and losses(tmp_path / "a")


def arguments(**changes):
    return SimpleNamespace(**{"num_gpus": 1, "num_machines": 1, "machine_rank": 0, "dist_url": "auto", **changes})


def test_one_process_runs_here_and_returns():
    assert launch(lambda args: args.num_gpus, arguments(num_gpus=0)) == 0
    assert (local_processes(arguments(num_gpus=0)), world_size(arguments(num_gpus=3, num_machines=2))) == (1, 6)


@pytest.mark.parametrize("changes", [{"num_gpus": -1}, {"num_machines": 0}, {"machine_rank": 1}])
def test_numbers_that_make_no_sense(changes):
    with pytest.raises(UserError, match="--num-gpus"):
        launch(lambda args: None, arguments(**changes))


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
def test_without_cuda_the_cpu_is_used_and_named(caplog):
    cfg = SimpleNamespace(MODEL=SimpleNamespace(DEVICE="cuda"))
    choose_device(cfg)
    assert cfg.MODEL.DEVICE in ("cpu", "xpu") and "No CUDA device" in caplog.text
