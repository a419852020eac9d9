"""A project with a plain subclass of DefaultTrainer; others build on it."""

from detectron2.engine import DefaultTrainer
from tiny import loader, setup


class Trainer(DefaultTrainer):
    @classmethod
    def build_train_loader(cls, cfg):
        return loader()


def main(opts, folder, trainer=Trainer):
    made = trainer(setup(opts, folder))
    made.resume_or_load(resume=False)
    made.train()
    return made
