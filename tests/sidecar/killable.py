"""A sidecar to be forked from a process that has done the imports, and killed."""

import os

from sidecar.config import SidecarConfig
from sidecar.program import run


def main(config: SidecarConfig, output: int, log: str) -> None:
    """Run a sidecar; its line on stdout goes to the descriptor ``output``, its log to a file."""
    os.dup2(output, 1)
    descriptor = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    os.dup2(descriptor, 2)
    run(config)
