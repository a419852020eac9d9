"""What is written to a checkpoint, how it gets to disk, and how every other checkpoint is read back."""

import contextlib
import logging
import os
import pickle
import re

import numpy as np
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.utils import comm

from . import lightning_files
from .errors import UserError
from .files import write_whole

logger = logging.getLogger(__name__)

TRUST_HINT = "Pass --trust (PrecisionCheckpointer.trust = True) when you know where the file comes from."


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, or would run code."""


class PrecisionCheckpointer(DetectionCheckpointer):
    """DetectionCheckpointer whose files are whole or not there, and whose reading runs no code from them.

    Attributes:
        trust (bool): whether files may hold pickled objects of any kind.
    """

    trust = False

    def save(self, name, **kwargs):
        """As in Detectron2. The file appears under its name only when it is complete; the pointer moves after it."""
        if not self.save_dir or not self.save_to_disk:
            return
        data = {"model": self.model.state_dict()}
        data.update((key, item.state_dict()) for key, item in self.checkpointables.items())
        data = plain({**data, **kwargs})
        basename = f"{name}.pth"
        path = os.path.join(self.save_dir, basename)
        self.logger.info(f"Saving checkpoint to {path}")
        self._write(path, lambda file: torch.save(data, file))
        self.tag_last_checkpoint(basename)

    def tag_last_checkpoint(self, last_filename_basename):
        path = os.path.join(self.save_dir, "last_checkpoint")
        self._write(path, lambda file: file.write(last_filename_basename.encode()))

    def _write(self, path, write):
        if "://" in path:  # a remote handler of the path manager, which has no rename
            with self.path_manager.open(path, "wb") as file:
                write(file)
            return
        os.makedirs(self.save_dir, exist_ok=True)
        write_whole(path, write)

    def has_checkpoint(self):
        """Whether there is something to resume from, with or without a pointer to it."""
        return bool(self.resume_candidates())

    def resume_candidates(self):
        """Checkpoint files of the folder: the one that `last_checkpoint` names, then the others, newest first."""
        if not self.save_dir or not self.path_manager.isdir(self.save_dir):
            return []
        numbered = {}
        for name in self.path_manager.ls(self.save_dir):
            match = re.fullmatch(r"model_(?:(\d+)|final)\.pth", name)
            if match:
                numbered[name] = float(match[1] or "inf")
        names = sorted(numbered, key=numbered.get, reverse=True)
        if "model_final.pth" in numbered:
            self._place_final(names)
        if self.path_manager.exists(os.path.join(self.save_dir, "last_checkpoint")):
            try:
                last = os.path.basename(self.get_checkpoint_file())
            except UnicodeDecodeError:  # the pointer is damaged
                last = ""
            names = [last, *(name for name in names if name != last)]
        return [os.path.join(self.save_dir, name) for name in names]

    def _place_final(self, names):
        """Moves model_final.pth behind checkpoints of a run that was continued after it; the name has no iteration."""

        def written(name):
            path = os.path.join(self.save_dir, name)
            return os.path.getmtime(path) if os.path.exists(path) else 0

        names.remove("model_final.pth")
        final = written("model_final.pth")
        newer = [number for number, name in enumerate(names, 1) if written(name) > final]
        names.insert(max(newer, default=0), "model_final.pth")

    def resume_or_load(self, path, *, resume=True):
        """As in Detectron2. A resume takes the newest checkpoint that can be read, and says which ones it passed over.

        Raises:
            CheckpointError: when checkpoints are there and none can be read, or `path` cannot.
            UserError: when the newest checkpoint is one of Lightning's.
        """
        candidates = self.resume_candidates() if resume else []
        if resume and self.save_dir:
            lightning_files.check_tool(self.save_dir, candidates, lightning=False)
        if not candidates:
            if resume:
                logger.info(f"Nothing to resume in {self.save_dir!r}: starting from {path or 'random weights'}.")
            return self.load(path, checkpointables=[])
        problems = []
        for candidate in candidates:
            try:
                result = self.load(candidate)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                logger.warning(f"Resumed from the older checkpoint {candidate}. {problem}")
            return result
        raise CheckpointError(
            f"No checkpoint in {self.save_dir} can be read. Move them away and start again, or leave --resume out.\n"
            + "\n".join(problems)
        )

    def load(self, path, *args, **kwargs):
        """As in Detectron2.

        Raises:
            CheckpointError: for a file that is missing, damaged, or would run code when `trust` is False.
        """
        try:
            if path and "://" not in path and not os.path.isfile(path.split("?")[0]):
                raise CheckpointError(f"The checkpoint {path} does not exist.")
            return super().load(path, *args, **kwargs)
        except OSError as error:
            raise CheckpointError(f"The checkpoint {path} cannot be read: {error}") from error
        finally:
            self._parsed_url_during_load = None  # Detectron2 forgets it only after a success

    def _load_file(self, filename):
        if filename.endswith(".pkl"):
            if not self.trust:
                _check_pickle(filename)
            return _checked(filename, _reading(filename, super()._load_file))
        if filename.endswith(".ckpt"):
            return _checked(filename, lightning_files.without_prefix(self._torch_load(filename)))
        if filename.endswith(".pyth"):
            self._torch_load(filename)  # only a check: Detectron2 reads such a file by its own torch.load
        elif not hasattr(DetectionCheckpointer, "_torch_load"):  # an older Detectron2, whose torch.load is too strict
            content = self._torch_load(filename)
            return _checked(filename, content if "model" in content else {"model": content})
        return _checked(filename, super()._load_file(filename))

    def _torch_load(self, filename):
        return read(filename, self.trust)


def read(filename, trust=False):
    """The dict that torch saved to a file. Without `trust`, only one of tensors, numpy arrays and plain types.

    Raises:
        CheckpointError: for a file that is damaged, holds something else, or would run code.
    """

    def load(name):
        with _numpy_allowed():
            return torch.load(name, map_location="cpu", weights_only=not trust)

    content = _reading(filename, load)
    if not isinstance(content, dict):
        raise CheckpointError(f"The checkpoint {filename} holds a {type(content).__name__} and no model.")
    return content


def _checked(filename, checkpoint):
    """`checkpoint` if it holds the weights of a model by name; other files can be read, too."""
    model = checkpoint["model"]
    if not isinstance(model, dict):
        raise CheckpointError(f"The checkpoint {filename} holds a {type(model).__name__} and no model.")
    for name, value in model.items():
        if not isinstance(name, str) or not isinstance(value, (torch.Tensor, np.ndarray)):
            raise CheckpointError(f"The checkpoint {filename} holds no model: {name!r} is a {type(value).__name__}.")
    return checkpoint


def _reading(filename, read):
    try:
        return read(filename)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"The checkpoint {filename} is damaged, or holds objects other than tensors and plain types, which could run "
            f"code when read ({_refused(error)}). {TRUST_HINT}"
        ) from error
    except CheckpointError:
        raise
    except Exception as error:  # unpicklers raise nearly everything
        raise CheckpointError(f"The checkpoint {filename} is damaged: {_first_line(error)}") from error


def _refused(error):
    """What an unpickler would not take: the name of the object where torch gives it."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    return f"it asks for {found[1]}" if found else _first_line(error)


def _first_line(error):
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


# What a .pkl of the model zoo is made of.
_PICKLE_GLOBALS = {
    *((module, name) for module in ("numpy.core.multiarray", "numpy._core.multiarray") for name in ("_reconstruct", "scalar")),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("collections", "OrderedDict"),
    ("_codecs", "encode"),
}  # fmt: skip


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if (module, name) in _PICKLE_GLOBALS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _check_pickle(filename):
    """Raises CheckpointError unless the file holds numpy arrays and plain types only."""

    def read(name):
        with open(name, "rb") as file:
            _PlainUnpickler(file, encoding="latin1").load()

    _reading(filename, read)


def _numpy_allowed():
    """Lets `weights_only` accept numpy arrays and numbers, which hooks of Detectron2 leave in checkpoints."""
    if not hasattr(torch.serialization, "safe_globals"):
        return contextlib.nullcontext()
    multiarray = np._core.multiarray if hasattr(np, "_core") else np.core.multiarray
    names = [np.ndarray, np.dtype, multiarray._reconstruct, multiarray.scalar]
    # numpy 1 and 2 name the same functions differently in a pickle.
    aliases = [(f, f"numpy.{core}.multiarray.{f.__name__}") for f in names[2:] for core in ("core", "_core")]
    kinds = [type(np.dtype(kind)) for kind in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?")]
    return torch.serialization.safe_globals([*names[:2], *aliases, *kinds])


def plain(value, path="checkpoint"):
    """`value` with numpy arrays as tensors and numpy numbers as Python's, so that `weights_only` loading reads it.

    Anything else that is neither a tensor nor a plain type is kept and named in a warning.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if type(value) is dict:
        return {key: plain(item, f"{path}.{key}") for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(plain(item, f"{path}[{number}]") for number, item in enumerate(value))
    if not isinstance(value, (torch.Tensor, torch.dtype, torch.device, dict, str, bytes, int, float, type(None))):
        logger.warning(f"{path} has type {type(value).__qualname__}: the checkpoint can be read only with --trust.")
    return value


def check_weights(path):
    """Raises UserError when MODEL.WEIGHTS names a local file that is not there. URLs are left to the download."""
    if path and "://" not in path and comm.is_main_process():
        local = path.split("?")[0]
        if not os.path.isfile(local):
            raise UserError(
                f"MODEL.WEIGHTS = {path!r}: the file does not exist. Give a path that does, a URL such as "
                'detectron2://ImageNetPretrained/MSRA/R-50.pkl, or "" to start from random weights.'
            )
