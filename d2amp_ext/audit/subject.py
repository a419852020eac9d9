"""The model and the data of a config, YAML or LazyConfig, as an audit needs them."""

import contextlib
import itertools
import os
import sys

from detectron2.config import instantiate
from detectron2.data import build_detection_test_loader, build_detection_train_loader
from detectron2.evaluation import inference_on_dataset
from detectron2.modeling import build_model

from .. import random_state
from ..checkpoint import PrecisionCheckpointer
from ..config import load_cfg
from ..config_files import find_config
from ..errors import UserError
from ..evaluation import build_evaluator, evaluating
from ..launch import choose_device
from ..lazy import cfg_of, lazy_names, load_lazy
from ..preflight import check_output, check_run


def load(config_file, opts, weights, *, evaluate=True, trust=False):
    """Reads and checks everything that can be checked before a model is built.

    Args:
        config_file (str): a path, a packaged config or a name in Detectron2's zoo; one that ends in .py is a LazyConfig.
        opts (list[str]): overrides in the way of the config.
        weights (str or None): instead of those that the config names.
        evaluate (bool): whether the test set will be used.
        trust (bool): whether config and weights may run code.

    Returns:
        Subject

    Raises:
        UserError: for every mistake in them.
    """
    lazy = find_config(config_file).endswith(".py")
    with lazy_names() if lazy else contextlib.nullcontext():
        if lazy:
            config = load_lazy(config_file, opts, trust=trust)
            cfg = cfg_of(config)
        else:
            config, cfg = None, load_cfg(config_file, opts, trust=trust)
        cfg.MODEL.WEIGHTS = weights or cfg.MODEL.WEIGHTS
        if not cfg.MODEL.WEIGHTS:
            raise UserError(f'MODEL.WEIGHTS is "", and an audit of random weights says nothing. {_last(cfg.OUTPUT_DIR)}')
        if "://" in cfg.OUTPUT_DIR:
            raise UserError(f"OUTPUT_DIR = {cfg.OUTPUT_DIR!r} is no local folder, which the picture and the JSON need.")
        check_output(cfg.OUTPUT_DIR)
        choose_device(cfg)
        has_test = bool(cfg.DATASETS.TEST) or lazy and "test" in config.dataloader
        if evaluate and not has_test:
            raise UserError("DATASETS.TEST is empty: there is no image to predict. Name a data set, or leave evaluation out "
                            "with --images 0.")  # fmt: skip
        check_run(cfg)
    return LazySubject(config, cfg, trust) if lazy else Subject(cfg, trust)


def _last(folder):
    path = next(filter(os.path.isfile, PrecisionCheckpointer(None, folder).resume_candidates()), None) if folder else None
    return f"Name a file with --weights, such as {path or 'output/model_final.pth'}."


class Subject:
    """Of a YAML config.

    Attributes:
        cfg (CfgNode): with the device that is there.
        weights (str): where they come from.
    """

    lazy = False

    def __init__(self, cfg, trust):
        self.cfg, self.weights, self._trust = cfg, cfg.MODEL.WEIGHTS, trust

    def build_model(self):
        """The model with its weights, on its device."""
        model = self._make_model()
        checkpointer = PrecisionCheckpointer(model)
        checkpointer.trust = self._trust
        checkpointer.load(self.weights)
        return model

    def batches(self, count):
        """The first training batches, as the model takes them."""
        found = list(itertools.islice(iter(self._train_loader()), count))
        if not found:
            raise UserError("The training set gives no batch: it has fewer images than a batch, or none with annotations.")
        return found

    def images(self, count):
        """The first images of the first test set, as the model takes them."""
        if not count:
            return []
        _, loader, _ = next(self.tests(None))
        return list(itertools.islice((image for batch in loader for image in batch), count))

    def _make_model(self):
        return build_model(self.cfg)

    def _train_loader(self):
        return build_detection_train_loader(self.cfg)

    def tests(self, folder):
        """(name, loader, evaluator) of each test set; without an evaluator where `folder` is None."""
        for name in self.cfg.DATASETS.TEST:
            evaluator = folder and build_evaluator(self.cfg, name, folder)
            yield name, build_detection_test_loader(self.cfg, name), evaluator


class LazySubject(Subject):
    """Of a LazyConfig."""

    lazy = True

    def __init__(self, config, cfg, trust):
        super().__init__(cfg, trust)
        self._config = config

    def _make_model(self):
        return instantiate(self._config.model).to(self.cfg.MODEL.DEVICE)

    def _train_loader(self):
        return instantiate(self._config.dataloader.train)

    def tests(self, folder):
        loader, evaluator = instantiate(self._config.dataloader.test), None
        if folder:
            if "evaluator" not in self._config.dataloader:
                raise UserError("The config has no dataloader.evaluator. Leave AP out with --no-ap.")
            evaluator = instantiate(self._config.dataloader.evaluator)
            if getattr(evaluator, "_output_dir", None):
                evaluator._output_dir = folder  # not beside the predictions of the run
        yield next(iter(self.cfg.DATASETS.TEST), "test"), loader, evaluator


def results_of(subject, model, policy, folder):
    """Evaluates a model on every test set.

    Args:
        subject (Subject):
        model (nn.Module):
        policy (PrecisionPolicy): resolved.
        folder (str): for what evaluators write.

    Returns:
        dict[str, float]: such as {"bbox/AP": 40.2}; with several sets, names begin with that of the set.
    """
    os.makedirs(folder, exist_ok=True)
    state, flat = random_state.capture(), {}
    try:
        with evaluating(model, policy) as model, contextlib.redirect_stdout(sys.stderr):  # pycocotools prints
            for name, loader, evaluator in subject.tests(folder):
                found = inference_on_dataset(model, loader, evaluator) or {}
                prefix = f"{name}/" if len(subject.cfg.DATASETS.TEST) > 1 else ""
                flat.update(_flat(found, prefix))
    finally:
        random_state.restore(state)
    return flat


def _flat(results, prefix):
    flat = {}
    for name, value in results.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{name}/"))
        elif isinstance(value, (int, float)):
            flat[f"{prefix}{name}"] = float(value)
    return flat
