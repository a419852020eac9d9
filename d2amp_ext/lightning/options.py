"""The arguments of a Lightning Trainer that follow from a config, and from the flags of `d2amp lightning`."""

import contextlib
import difflib
import logging
import sys
import warnings

import torch
from detectron2.utils import comm
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from ..errors import UserError
from ..policy import PrecisionPolicy
from .checkpoint import PlainCheckpointIO
from .names import OWN_PRECISION
from .precision import PolicyPrecision


def trainer_options(cfg, *, trust=False):
    """What `Trainer(**trainer_options(cfg))` needs to train a TrainingModule as its config says.

    Add accelerator, devices, strategy, loggers and callbacks of your own; to change one of these, change the dict.

    Args:
        cfg (CfgNode): with the keys of `add_amp_config`.
        trust (bool): whether checkpoints may hold pickled objects of any kind.

    Returns:
        dict
    """
    plugins = [PlainCheckpointIO(trust)]
    policy = PrecisionPolicy.from_cfg(cfg)
    if policy.precision != "off":
        # TrainingModule evaluates as TEST.AMP says by itself.
        plugins.append(PolicyPrecision(policy, evaluation=PrecisionPolicy("off")))
    return {
        "max_steps": cfg.SOLVER.MAX_ITER,
        "max_epochs": -1,  # the data never end
        "accumulate_grad_batches": cfg.SOLVER.ACCUMULATE_STEPS,
        "plugins": plugins,
        "use_distributed_sampler": False,  # Detectron2's samplers share the images out
        # Detectron2's hooks do these.
        "check_val_every_n_epoch": 10**9,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "logger": False,
    }


def build_trainer(cfg, accelerator="auto", strategy="auto", precision=None, trust=False):
    """The Trainer of a run whose processes are there.

    Args:
        cfg (CfgNode):
        accelerator (str): a name of Lightning's; "auto" means that of MODEL.DEVICE.
        strategy (str): a name of Lightning's.
        precision (str or None): a name of Lightning's that goes past the policy.
        trust (bool): whether checkpoints may hold pickled objects of any kind.

    Returns:
        Trainer

    Raises:
        UserError: for what Lightning refuses, and for what it would refuse later.
    """
    options = trainer_options(cfg, trust=trust)
    options["plugins"].append(RunningProcesses())
    device = torch.device(cfg.MODEL.DEVICE)
    single = device.index is not None and comm.get_world_size() == 1
    has_policy = any(isinstance(plugin, PolicyPrecision) for plugin in options["plugins"])
    _hush_lightning()
    try:
        with _without_announcements():
            return Trainer(
                **options,
                accelerator=device.type if accelerator == "auto" else accelerator,
                devices=[device.index] if single and device.type != "cpu" else comm.get_local_size(),
                num_nodes=comm.get_world_size() // comm.get_local_size(),
                strategy=_strategy(strategy, cfg, has_policy),
                precision=precision,
                enable_progress_bar=sys.stderr.isatty(),
            )
    except UserError:
        raise
    except (ValueError, TypeError, RuntimeError, ImportError, MisconfigurationException) as error:
        asked = f"--accelerator {accelerator} --strategy {strategy}" + (f" --precision {precision}" if precision else "")
        raise UserError(f"Lightning refuses {asked} on this machine: {_first_sentences(error)}") from error


def _strategy(name, cfg, has_policy):
    """A strategy, or the name of one that needs no arguments from us."""
    if name == "auto":
        if comm.get_world_size() == 1:
            return name
        name = "ddp"
    name = name.lower()
    if name not in StrategyRegistry:
        near = difflib.get_close_matches(name, list(StrategyRegistry), n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UserError(f"--strategy {name} is none of Lightning's. Valid: auto, {', '.join(sorted(StrategyRegistry))}.{hint}")
    cls, arguments = StrategyRegistry[name]["strategy"], StrategyRegistry[name]["init_params"]
    if cls is not DDPStrategy:
        if has_policy and name.startswith(OWN_PRECISION):
            raise UserError(
                f"--strategy {name} works with a precision of its own only, and not with the policy of SOLVER.AMP. "
                "Choose ddp, or set SOLVER.AMP.ENABLED False and --precision to one past the policy, such as bf16-true."
            )
        return name
    ddp = {key.lower(): value for key, value in cfg.SOLVER.DDP.items()}
    # However a strategy of this family would start its processes: here they are there already.
    return cls(**{**ddp, **arguments, "start_method": "popen"})


@contextlib.contextmanager
def _without_announcements():
    """While a Trainer is made, which says what hardware is not there and advertises a service."""
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)


def _hush_lightning():
    """Leaves out what torch says about Lightning's own code, which a user cannot act on."""
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")


def _first_sentences(error):
    return " ".join(str(error).split())[:600]


class RunningProcesses(LightningEnvironment):
    """Processes that Detectron2's launcher or torchrun has started, with their process group."""

    @property
    def creates_processes_externally(self):
        return True

    def world_size(self):
        return comm.get_world_size()

    def set_world_size(self, size):
        pass

    def global_rank(self):
        return comm.get_rank()

    def local_rank(self):
        return comm.get_local_rank() if comm.get_world_size() > 1 else 0

    def node_rank(self):
        return comm.get_rank() // comm.get_local_size() if comm.get_world_size() > 1 else 0

    def teardown(self):
        pass
