"""The stages of a model, by the top two levels of its modules, under names that can be read."""

import re

from torch.nn.parallel import DistributedDataParallel

MOST_CHILDREN = 8  # a module with more children is one stage

# Names of parameters -> stage, for the layouts that Detectron2 has. The first match counts; what matches nothing is
# named by the general rule.
KNOWN = [
    (r"backbone\.bottom_up\.", "backbone"),
    (r"backbone\.net\.", "backbone"),
    (r"backbone\.(fpn_|top_block|simfp)", "fpn"),
    (r"backbone\.", "backbone"),
    (r"proposal_generator\.", "rpn"),
    (r"roi_heads\.(\w+?)_(head|predictor|pooler)\.", r"roi_\1"),
    (r"roi_heads\.(\w+)\.", r"roi_\1"),
    (r"sem_seg_head\.", "sem_seg"),
]


def group_parameters(model, optimizer):
    """The parameters that an optimizer updates, by stage.

    Args:
        model (nn.Module): as it is or in DistributedDataParallel.
        optimizer (torch.optim.Optimizer):

    Returns:
        dict[str, list[Parameter]]: in the order of the model. Parameters that are not the model's are under "other".
    """
    model = unwrap(model)
    updated = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    names = {id(p): name for name, p in model.named_parameters()}
    root = _root(list(names.values()))
    children = _children([name[len(root) :] for name in names.values()])
    stages = {}
    for key, name in names.items():
        if key in updated:
            stages.setdefault(stage_of(name[len(root) :], children), []).append(updated.pop(key))
    if updated:
        stages["other"] = list(updated.values())
    return stages


def unwrap(model):
    return model.module if isinstance(model, DistributedDataParallel) else model


def stage_of(name, children):
    """The stage of a parameter.

    Args:
        name (str): of the parameter, from the module on that holds the stages.
        children (dict[str, set[str]]): for each top module the names of the modules in it that have parameters.
    """
    stage = next((match.expand(to) for pattern, to in KNOWN if (match := re.match(pattern, name))), None)
    if stage is None:
        modules = name.split(".")[:-1]
        if not modules:
            return "model"
        below = children[modules[0]]
        split = 1 < len(below) <= MOST_CHILDREN and not any(child.isdigit() for child in below)
        stage = "_".join(modules[:2] if split else modules[:1])
    return stage.replace("loss", "cost")  # the console takes every "loss" for a loss


def _root(names):
    """What all names start with, as "detector." does when a model is wrapped into one module."""
    root = ""
    while names:
        heads = {name[len(root) :].split(".")[0] for name in names}
        deep = all(name[len(root) :].count(".") >= 2 for name in names)
        head = heads.pop()
        if heads or not deep or any(re.match(pattern, f"{head}.x.") for pattern, _ in KNOWN):
            break
        root += head + "."
    return root


def _children(names):
    children = {}
    for name in names:
        modules = name.split(".")[:-1]
        if modules:
            children.setdefault(modules[0], set()).update(modules[1:2] or [""])
    return children
