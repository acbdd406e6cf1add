"""A callback that writes down every event, asks for evaluation and save, and logs a field; a logger of samples."""

import json

from skyrl.train.utils.callbacks import TrainingCallback
from skyrl.train.utils.trajectory_logging import TrajectoryLogger


class Events(TrainingCallback):
    def __init__(self, path):
        self.path = path

    def write(self, event, given, **more):
        with self.path.open("a") as file:
            file.write(json.dumps({"event": event, "step": given.global_step, **more}) + "\n")

    def on_train_start(self, trainer, given, control):
        self.write("train_start", given, total_steps=given.total_steps)

    def on_train_end(self, trainer, given, control):
        self.write("train_end", given)

    def on_epoch_start(self, trainer, given, control):
        self.write("epoch_start", given)

    def on_epoch_end(self, trainer, given, control):
        self.write("epoch_end", given)

    def on_step_start(self, trainer, given, control):
        self.write("step_start", given)

    def on_step_end(self, trainer, given, control):
        self.write("step_end", given, rows=len(given.batch["sequences"]), loss=given.metrics["policy_loss"])
        control.should_save = control.should_evaluate = given.global_step == 1

    def on_eval_start(self, trainer, given, control):
        self.write("eval_start", given)

    def on_eval_end(self, trainer, given, control):
        self.write("eval_end", given, score=given.metrics["eval/all/avg_score"])

    def on_save(self, trainer, given, control):
        self.write("save", given, path=given.ckpt_path)

    def on_log(self, trainer, given, control):
        given.logs["own/twice_the_step"] = 2.0 * given.global_step
        self.write("log", given)


class ShoutingLogger(TrajectoryLogger):
    def format_trajectory(self, *args, **kwargs):
        return super().format_trajectory(*args, **kwargs).upper()
