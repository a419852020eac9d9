"""Lightning's checkpoints, for who has no Lightning: the model in them, and which tool goes on from a folder."""

import os

from .errors import UserError

LAST = "last.ckpt"  # what `d2amp lightning` goes on from
_PREFIX = "model."  # the attribute of TrainingModule, and of most other modules, that is the model


def without_prefix(content):
    """What a checkpoint of Detectron2 would hold, from one of Lightning.

    Args:
        content (dict): of a .ckpt; one that is none of Lightning's is returned as it is, or taken for a model.

    Returns:
        dict: "model", the weights by name, and "iteration" where the file says how many updates were made.
    """
    if "state_dict" not in content:
        return content if "model" in content else {"model": content}
    weights = content["state_dict"]
    if isinstance(weights, dict) and weights and all(str(name).startswith(_PREFIX) for name in weights):
        weights = {name[len(_PREFIX) :]: value for name, value in weights.items()}
    found = {"model": weights}
    if content.get("global_step"):
        found["iteration"] = content["global_step"] - 1
    return found


def check_tool(folder, others, lightning):
    """Raises UserError when the newest checkpoint of a folder is one that another tool goes on from.

    Args:
        folder (str): OUTPUT_DIR.
        others (list[str]): Detectron2's checkpoints in it, the newest first.
        lightning (bool): whether it is `d2amp lightning` that asks.
    """
    path = os.path.join(folder, LAST)
    last = _written(path)
    # Both tools write model_final.pth, Lightning's right after last.ckpt: only its numbered fellows tell.
    numbered = [other for other in others if os.path.basename(other) != "model_final.pth"]
    newest = (numbered if last and lightning else others or [""])[:1]
    other = _written(newest[0]) if newest else 0
    if lightning and other > last:
        name = os.path.basename(newest[0])
        raise UserError(
            f"--resume: the newest checkpoint in {folder} is {name}, which d2amp train (tools/train_net.py) goes on "
            f"from. Use that, or start here from its weights, without --resume: MODEL.WEIGHTS {newest[0]}"
        )
    if not lightning and last > other:
        raise UserError(
            f"--resume: the newest checkpoint in {folder} is {LAST}, which d2amp lightning "
            f"(tools/lightning_train_net.py) goes on from. Use that, or start here from its weights, without --resume: "
            f"MODEL.WEIGHTS {path}"
        )


def _written(path):
    return os.path.getmtime(path) if os.path.exists(path) else 0
