"""A trainer that does something around the step of its inner trainer."""

import default


class Trainer(default.Trainer):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.seen = []

    def run_step(self):
        self._trainer.iter = self.iter
        self._trainer.run_step()
        self.seen.append(self.iter)
