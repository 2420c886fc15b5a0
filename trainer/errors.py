"""What can go wrong between the daemon and the trainer."""


class TrainerDied(Exception):
    """The trainer process is gone. Start it again and repeat the same step: nothing was lost."""


class TrainingRejected(Exception):
    """The batch can't be trained on, for the reason given. The parent version is unchanged."""
