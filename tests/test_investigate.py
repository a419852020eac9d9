"""Which steps are looked into, what is told of them, and that nobody else notices."""

import logging
import os
import tempfile
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import TinyModel, tiny_data
from detectron2.layers import NaiveSyncBatchNorm
from detectron2.utils.events import EventStorage
from torch.nn.parallel import DistributedDataParallel

from d2amp_ext import AMPTrainer, NonFiniteError, PrecisionPolicy, ScalerOptions
from d2amp_ext.numerics.bundle import read_bundle
from test_statistics import Normed, data


def run(policy, batches, steps=None, model=None, folder=None, **options):
    torch.manual_seed(0)
    window = options.get("accumulate_steps", 1)
    model = model or TinyModel()
    trainer = AMPTrainer(model, batches, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), policy=policy, **options)
    if folder:
        trainer.investigator.write_bundles(str(folder))
    trainer.train(0, steps or len(batches) // window)
    return trainer


def names(folder):
    path = os.path.join(folder, "nonfinite")
    return sorted(os.listdir(path)) if os.path.isdir(path) else []


def lines(caplog, text="First module"):
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("window", [1, 2])
def test_a_loss_that_is_not_finite(tmp_path, caplog, precision, window):
    policy = PrecisionPolicy(precision, scaler=ScalerOptions(init_scale=16.0))
    run(policy, tiny_data(8, spoil={5}), folder=tmp_path, accumulate_steps=window)
    number = 5 // window
    assert names(tmp_path) == [f"iteration_{number:07d}_rank0.pth"]
    (line,) = lines(caplog, "d2amp replay")
    assert "image_5.png: spoil" in line and "loss terms: loss_a, loss_b" in line and names(tmp_path)[0] in line
    bundle = read_bundle(tmp_path / "nonfinite" / names(tmp_path)[0])
    assert (bundle["iteration"], bundle["cause"], bundle["precision"], bundle["skips"]) == (number, "loss", precision, [1, 1])
    assert bundle["scale"] == (16.0 if precision == "fp16" else 1.0) and bundle["weights"] is None
    assert bundle["finding"]["micro_batch"] == 5 % window + 1 and len(bundle["batches"]) == window
    assert bundle["finding"]["inputs"] == ("image_5.png: spoil",)


def test_the_first_two_and_the_newest_three_are_kept(tmp_path):
    run(PrecisionPolicy("bf16"), tiny_data(24, spoil=set(range(1, 24, 2))), folder=tmp_path)
    assert [int(name[10:17]) for name in names(tmp_path)] == [1, 3, 19, 21, 23]


class SquareRoot(TinyModel):
    """A gradient that is not finite, of losses that are, for samples that say so."""

    def forward(self, batch):
        losses = super().forward(batch)
        if "root" in batch[0]:
            losses["loss_c"] = (self.second(self.first(batch[0]["x"])).float() * 0).sqrt().sum()
        return losses


def rooted(count, *numbers):
    batches = tiny_data(count)
    for number in numbers:
        batches[number][0]["root"] = True
    return batches


@pytest.mark.parametrize("precision, looked_into", [("fp32", [1, 3, 4, 5, 6]), ("bf16", [1, 3, 4, 5, 6]), ("fp16", [5])])
def test_gradients_with_a_scaler_are_looked_into_at_the_third_skip_in_a_row(tmp_path, caplog, precision, looked_into):
    policy = PrecisionPolicy(precision, scaler=ScalerOptions(init_scale=16.0))
    trainer = run(policy, rooted(8, 1, 3, 4, 5, 6), model=SquareRoot(), folder=tmp_path)
    assert trainer.last_step.skips == 5
    assert [int(name[10:17]) for name in names(tmp_path)] == looked_into
    assert len(lines(caplog, "SqrtBackward0")) == len(looked_into) and "loss terms: loss_c" in caplog.text


def test_a_lone_overflow_costs_nothing(tmp_path, caplog):
    policy = PrecisionPolicy("fp16", scaler=ScalerOptions(init_scale=16.0))
    trainer = run(policy, rooted(6, 2, 3), model=SquareRoot(), folder=tmp_path)
    assert trainer.last_step.skips == 2 and names(tmp_path) == [] and not lines(caplog, "replay")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_message_that_ends_a_run(tmp_path, precision):
    policy = PrecisionPolicy(precision, nonfinite="raise", scaler=ScalerOptions(init_scale=16.0))
    with pytest.raises(NonFiniteError) as error:
        run(policy, rooted(6, 2), model=SquareRoot(), folder=tmp_path)
    text = str(error.value)
    for part in ("iteration 2", f"Precision {precision}", "Learning rate 0.05", "image_2.png", "the model's own code (SquareRoot",
                 "SqrtBackward0", "loss terms: loss_c", "d2amp replay", "Try SOLVER.AMP.PRECISION"):  # fmt: skip
        assert part in text
    assert ("gradient scale 16" in text) == (precision == "fp16") and error.value.record.cause == "gradient"
    assert text.count("Training stopped") == 1 and len(names(tmp_path)) == 1


def test_too_many_in_a_row(tmp_path):
    policy = PrecisionPolicy("fp32", max_consecutive_skips=2)
    with pytest.raises(NonFiniteError, match="first module whose output is not finite: the model's own code"):
        run(policy, tiny_data(9, spoil={3, 4, 5, 6}), folder=tmp_path)
    assert [int(name[10:17]) for name in names(tmp_path)] == [3, 4, 5]


def test_without_a_folder_it_is_told_and_nothing_is_written(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    run(PrecisionPolicy("fp32"), tiny_data(4, spoil={1}))
    assert lines(caplog, "Inputs that are not finite") and not lines(caplog, "d2amp replay") and not os.listdir(tmp_path)


def test_weights_on_request_are_those_before_the_step(tmp_path):
    torch.manual_seed(0)
    policy = PrecisionPolicy("fp32")
    model = Normed()
    trainer = AMPTrainer(model, data(4, spoil={2}), torch.optim.SGD(model.parameters(), lr=0.05), policy=policy)
    trainer.investigator.write_bundles(str(tmp_path), weights=True)
    states = []
    trainer.after_step = lambda: states.append({name: value.clone() for name, value in model.state_dict().items()})
    trainer.train(0, 4)
    weights = read_bundle(tmp_path / "nonfinite" / names(tmp_path)[0])["weights"]
    assert weights.keys() == states[1].keys() and all(torch.equal(weights[name], states[1][name]) for name in weights)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_nobody_notices(tmp_path, precision, monkeypatch):
    """A run in which steps are looked into has the bits of one in which none is, with dropout and batch norm."""
    from d2amp_ext.numerics.investigate import Investigator

    policy = PrecisionPolicy(precision, scaler=ScalerOptions(init_scale=16.0))

    def bits():
        trainer = run(policy, data(8, spoil={2, 3, 6}), model=Normed(), folder=tmp_path)
        return [*trainer.model.state_dict().values(), torch.get_rng_state(), *(v for v, _ in trainer.storage.history("total_loss").values())]

    looked = bits()
    assert len(names(tmp_path)) == 3
    monkeypatch.setattr(Investigator, "_look", lambda *args: "")
    for a, b in zip(looked, bits()):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_a_step_that_fp32_could_not_save_is_replayed_in_fp32(tmp_path):
    """What 16 bit overflows in is not what made it fail."""
    policy = PrecisionPolicy("fp16", nonfinite="retry_fp32", scaler=ScalerOptions(init_scale=16.0))
    trainer = run(policy, data(6, huge={1, 3}, spoil={3}), model=Normed(), folder=tmp_path)
    assert (trainer.last_step.retries, trainer.last_step.skips) == (1, 1)
    bundle = read_bundle(tmp_path / "nonfinite" / names(tmp_path)[0])
    assert (bundle["precision"], bundle["iteration"], bundle["scale"]) == ("fp32", 3, 1.0)
    assert bundle["finding"]["forward"]["cls"] == "Normed" and bundle["finding"]["inputs"] == ("image_3.png: spoil",)


def test_the_replay_has_the_losses_of_the_step(tmp_path):
    """From the saved random state and the statistics before the step: the terms that are finite agree in every bit."""

    class Half(Normed):
        def forward(self, batch):
            losses = super().forward(batch)
            spoilt = losses["loss_a"] * batch[0].get("spoilt", 1.0)
            return {"loss_a": losses["loss_a"], "loss_b": spoilt}

    batches = data(6)
    batches[4][0]["spoilt"] = float("nan")
    run(PrecisionPolicy("bf16"), batches, model=Half(), folder=tmp_path)
    bundle = read_bundle(tmp_path / "nonfinite" / names(tmp_path)[0])
    assert bundle["finding"]["losses"]["loss_a"] == bundle["losses"]["loss_a"] and bundle["finding"]["terms"] == ("loss_b",)


def test_a_replay_that_fails_is_a_line_of_the_log(caplog):
    class Fragile(TinyModel):
        calls = 0

        def forward(self, batch):
            Fragile.calls += 1
            if Fragile.calls == 3:  # the replay of the second step
                raise RuntimeError("out of memory")
            return super().forward(batch)

    trainer = run(PrecisionPolicy("fp32"), tiny_data(4, spoil={1}), model=Fragile())
    assert trainer.last_step.skips == 1 and "could not be replayed: RuntimeError: out of memory" in caplog.text


def test_a_bundle_that_cannot_be_written_is_a_line_of_the_log(tmp_path, caplog):
    (tmp_path / "nonfinite").write_text("a file in the way")
    trainer = run(PrecisionPolicy("fp32"), tiny_data(4, spoil={1}), folder=tmp_path)
    assert trainer.last_step.skips == 1 and "was not written" in caplog.text and lines(caplog, "Inputs that are")


def test_a_remote_folder_gets_no_bundles(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    run(PrecisionPolicy("fp32"), tiny_data(4, spoil={1}), folder="s3://bucket/run")
    assert "no local folder" in caplog.text and not os.listdir(tmp_path)


def test_a_loss_without_a_gradient_is_not_replayed(tmp_path):
    class Constant(TinyModel):
        def forward(self, batch):
            return {"loss_a": torch.ones(())}

    policy = PrecisionPolicy("fp32", max_consecutive_skips=1)
    with pytest.raises(NonFiniteError, match="no parameter has a gradient"):
        run(policy, tiny_data(4), model=Constant(), folder=tmp_path)
    assert names(tmp_path) == []


def test_a_healthy_step_replays_nothing(monkeypatch):
    from d2amp_ext.numerics import investigate

    monkeypatch.setattr(investigate, "locate", lambda *args, **kwargs: pytest.fail("replayed"))
    run(PrecisionPolicy("bf16"), tiny_data(6))


# Two ranks: none waits for the other


class Synced(Normed):
    """With a batch norm of all ranks, and a forward that fails on one rank alone when it is told to."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.Sequential(torch.nn.Unflatten(1, (16, 1, 1)), NaiveSyncBatchNorm(16), torch.nn.Flatten())

    def forward(self, batch):
        losses = super().forward(batch)
        if dist.is_initialized():  # as DETR and its kin count their boxes
            count = torch.ones(())
            dist.all_reduce(count)
        if "raise" in batch[0]:
            raise FloatingPointError("Predicted boxes or scores contain Inf/NaN.")
        return losses


def rank_worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    logging.basicConfig(filename=f"{folder}/log{rank}.txt")
    torch.manual_seed(0)
    model = Synced()
    batches = data(16)[8 * rank :][:8]
    if rank == 1:
        batches[2][0]["raise"] = True
        batches[5][0]["spoil"] = float("nan")
    trainer = AMPTrainer(
        DistributedDataParallel(model), batches, torch.optim.SGD(model.parameters(), lr=0.05), policy=PrecisionPolicy("bf16")
    )
    trainer.investigator.write_bundles(folder)
    causes = []
    with EventStorage(0) as trainer.storage:
        for trainer.iter in range(8):
            trainer.run_step()
            causes.append(trainer.last_step.cause)
    torch.save({"causes": causes, "weights": [p.detach() for p in model.parameters()]}, f"{folder}/rank{rank}.pth")
    dist.destroy_process_group()


def test_two_ranks_do_not_hang():
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(rank_worker, args=(folder,), nprocs=2, start_method="spawn", join=False)
        end = time.monotonic() + 120
        while not context.join(timeout=5):
            if time.monotonic() > end:
                for process in context.processes:
                    process.kill()
                pytest.fail("the ranks wait for each other")
        first, second = (torch.load(f"{folder}/rank{rank}.pth") for rank in range(2))
        assert first["causes"] == second["causes"] == [None, None, "forward", None, None, "loss", None, None]
        assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(first["weights"], second["weights"]))
        assert names(folder) == ["iteration_0000002_rank1.pth", "iteration_0000005_rank1.pth"]
        logs = [open(f"{folder}/log{rank}.txt").read() for rank in range(2)]
        assert "everything was finite" in logs[0].lower() and "image_13.png" not in logs[0]
        assert "statistics of this rank alone" in logs[1] and "image_13.png: spoil" in logs[1]
