"""A training script as it lies in a repository: flags, launch, and what each process did in a file."""

import argparse
import json
import os

import default
from detectron2.engine import launch
from detectron2.utils import comm
from tiny import setup


def main(args):
    trainer = default.Trainer(setup(args.opts, args.folder))
    trainer.train()
    found = {
        "trainer": type(trainer._trainer).__module__ + "." + type(trainer._trainer).__name__,
        "dtype": str(getattr(trainer.model, "module", trainer.model).dtypes[-1]),
        "policy": trainer.policy.precision if hasattr(trainer, "policy") else None,
        "world": comm.get_world_size(),
    }
    with open(os.path.join(args.folder, f"rank{comm.get_rank()}.json"), "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-processes", type=int, default=1)
    parser.add_argument("--folder", required=True)
    parser.add_argument("opts", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    launch(main, args.num_processes, dist_url="auto", args=(args,))
