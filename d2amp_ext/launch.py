"""Starting the processes of a run: one, Detectron2's launcher, or torchrun's environment."""

import logging
import os

import torch
import torch.distributed as dist
from detectron2.engine import launch as detectron2_launch
from detectron2.utils import comm

from .errors import UserError

logger = logging.getLogger(__name__)


def under_torchrun():
    """Whether torchrun (or a launcher that sets the same variables) started this process."""
    return "LOCAL_RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ


def local_processes(args):
    """How many processes `launch` starts on this machine; 0 GPUs mean one process on the CPU."""
    return 1 if under_torchrun() else max(args.num_gpus, 1)


def world_size(args):
    """How many processes take part in the run, on all machines."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else local_processes(args) * args.num_machines


def launch(main, args, check=None):
    """Runs `main(args)` in every process of the run.

    Args:
        main (callable): module-level, so that spawned processes can import it.
        args (Namespace): with num_gpus (processes on this machine), num_machines, machine_rank and dist_url, as
            Detectron2's `default_argument_parser` makes them. Under torchrun its variables count instead.
        check (callable or None): `check(args)` is called here before several processes are started, so that a mistake is
            reported once, and not by every rank.

    Returns:
        what `main` returns when it runs in this process, else None.
    """
    if under_torchrun():
        return torchrun_worker(main, args)
    if torch.cuda.is_available() and args.num_gpus > torch.cuda.device_count():
        raise UserError(f"--num-gpus {args.num_gpus}: this machine has {torch.cuda.device_count()}.")
    if args.num_gpus < 0 or args.num_machines < 1 or not 0 <= args.machine_rank < args.num_machines:
        raise UserError(
            f"--num-gpus {args.num_gpus} --num-machines {args.num_machines} --machine-rank {args.machine_rank}: "
            "the first must not be negative, the last must be below the number of machines."
        )
    if check is not None and local_processes(args) > 1:
        check(args)
    if world_size(args) == 1:
        return main(args)
    detectron2_launch(
        main,
        local_processes(args),
        num_machines=args.num_machines,
        machine_rank=args.machine_rank,
        dist_url=args.dist_url,
        args=(args,),
    )


def torchrun_worker(main, args):
    """Runs `main(args)` in one of the processes that torchrun started, with the process groups of Detectron2."""
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if has_gpu else "gloo")
    try:
        # Detectron2's comm.get_local_rank() needs this group, which only its own launcher makes.
        comm.create_local_process_group(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        comm.synchronize()
        return main(args)
    finally:
        dist.destroy_process_group()


def ensure_local_group(processes):
    """Makes the group that Detectron2's comm.get_local_rank() needs, where something else than its launcher or ours
    made the processes.

    Args:
        processes (int): on this machine, where LOCAL_WORLD_SIZE does not say it.
    """
    try:
        comm.get_local_rank()
    except AssertionError:
        comm.create_local_process_group(int(os.environ.get("LOCAL_WORLD_SIZE") or processes))


def choose_device(cfg):
    """Sets MODEL.DEVICE to what is there when it says "cuda" and there is no CUDA device; says so."""
    if not cfg.MODEL.DEVICE.startswith("cuda") or torch.cuda.is_available():
        return
    has_xpu = hasattr(torch, "xpu") and torch.xpu.is_available()
    cfg.MODEL.DEVICE = "xpu" if has_xpu else "cpu"
    logger.warning(f"No CUDA device: this run uses MODEL.DEVICE {cfg.MODEL.DEVICE}.")
