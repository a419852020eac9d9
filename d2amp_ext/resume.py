"""What a checkpoint holds beyond Detectron2's state, so that a resumed run goes on exactly where it was."""

import logging

from detectron2.utils import comm

from . import random_state
from .data.position import DataPosition

logger = logging.getLogger(__name__)


class ResumeState:
    """The random states and data positions of all ranks, and the last evaluated iteration.

    A checkpointable: give it to a checkpointer, or add its state to that of a trainer.

    Attributes:
        evaluated_iter (int): the last iteration after which a periodic evaluation ended. -1: none.
        resumed (bool): whether `restore` has something to put back.
    """

    def __init__(self, trainer, data_loader):
        """
        Args:
            trainer (TrainerBase): whose `iter` counts; a weak proxy does.
            data_loader (iterable): of training, not iterated yet.
        """
        self._trainer = trainer
        self._position = DataPosition(data_loader)
        self._gathered = (None, None)  # iteration, states of all ranks
        self._loaded = None
        self.evaluated_iter = -1

    @property
    def resumed(self):
        return self._loaded is not None

    def gather(self):
        """Collects what every rank adds to the next checkpoint of this iteration. Called on every rank."""
        self._gathered = (self._trainer.iter, comm.gather(self._rank_state()))

    def state_dict(self):
        """dict: "ranks", a list of the states of ranks, and "evaluated_iter"; plain types and tensors."""
        iteration, states = self._gathered
        ranks = states if iteration == self._trainer.iter else [self._rank_state()]
        return {"ranks": ranks, "evaluated_iter": self.evaluated_iter}

    def load_state_dict(self, state):
        """Keeps a state for `restore`. One of a checkpoint from elsewhere may lack everything."""
        self.evaluated_iter = state.get("evaluated_iter", state.get("iteration", -1))
        self._loaded = state.get("ranks", [])

    def restore(self, start_iterator=lambda: None):
        """Continues random numbers and data where the checkpoint was written; before the first step of a resumed run.

        Args:
            start_iterator (callable): makes the iterator of the data loader if the trainer has one.
        """
        if self._loaded is None:
            return
        states, self._loaded = self._loaded, None
        if len(states) != comm.get_world_size():
            logger.warning(
                f"The checkpoint has the random states of {len(states)} rank(s), this run has {comm.get_world_size()}: "
                "random numbers and the order of data start again."
            )
            return
        state = states[comm.get_rank()]
        obstacle = self._position.restore(state["data"])
        if obstacle:
            logger.warning(f"The order of data starts again: {obstacle}.")
        start_iterator()  # making an iterator draws from torch's generator: before the next line
        random_state.restore(state["random"])

    def _rank_state(self):
        return {"random": random_state.capture(), "data": self._position.state_dict()}
