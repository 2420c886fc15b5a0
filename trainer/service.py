"""The trainer's process: ``python -m trainer.service PARENT_PID``, driven by ``trainer.client``.

It speaks one JSON object per line: requests on stdin, replies and progress on stdout.

    {"id": 1, "method": "hello", "params": {"config": {…}, "model": "…", "directory": "…"}}
    {"id": 2, "method": "bootstrap", "params": {}}
    {"id": 3, "method": "train", "params": {"batch": "…", "parent": "v3", "version": "v4"}}

    {"id": 3, "progress": "update"}
    {"id": 3, "result": {…}}
    {"id": 3, "error": "rejected" | "user", "message": "…"}

``hello`` waits until no other trainer uses the directory. Anything unexpected ends the process:
its state would be in doubt, and a new one continues from what is on disk. It ends at the end of
stdin, and is killed by the kernel when its parent dies, in whatever state that is.
"""

import ctypes
import fcntl
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import msgspec

from deploy.errors import UserError
from trainer.config import TrainerConfig
from trainer.errors import TrainingRejected

_PR_SET_PDEATHSIG = 1


class Request(msgspec.Struct, frozen=True):
    id: int
    method: str
    params: dict[str, Any] = {}


class Hello(msgspec.Struct, frozen=True):
    """Parameters of ``hello``."""

    config: TrainerConfig
    model: str
    directory: str


class Service:
    """Answers requests one after the other."""

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        self._send = send
        self._trainer: Any = None
        self._lock: IO[str] | None = None

    def answer(self, request: Request) -> None:
        """Carry out a request and send its reply.

        Raises:
            Exception: anything that is not the caller's to handle.
        """
        try:
            result = getattr(self, f"_do_{request.method}")(request.id, **request.params)
        except TrainingRejected as error:
            self._send({"id": request.id, "error": "rejected", "message": str(error)})
        except UserError as error:
            self._send({"id": request.id, "error": "user", "message": str(error)})
        else:
            self._send({"id": request.id, "result": msgspec.to_builtins(result)})

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.close()

    def _do_hello(self, request_id: int, **params: Any) -> dict[str, int]:
        hello = msgspec.convert(params, Hello)
        directory = Path(hello.directory)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(directory / "lock")
        except OSError as error:
            raise UserError(f"trainer directory {directory} can't be used: {error}") from None

        from trainer.trainer import Trainer

        self._request_id = request_id
        self._trainer = Trainer(hello.config, Path(hello.model), directory, self._progress)
        return {"pid": os.getpid()}

    def _do_bootstrap(self, request_id: int) -> Any:
        self._request_id = request_id
        return self._trainer.bootstrap()

    def _do_train(self, request_id: int, batch: str, parent: str, version: str) -> Any:
        self._request_id = request_id
        return self._trainer.train(Path(batch), parent, version)

    def _progress(self, stage: str) -> None:
        self._send({"id": self._request_id, "progress": stage})


def _locked(path: Path) -> IO[str]:
    """Open and lock a file, waiting for a trainer that still holds it."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"waiting for another trainer to release {path}", file=sys.stderr, flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)
    return file


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the trainer's parent is gone already")


def main() -> int:
    _die_with_parent(int(sys.argv[1]))
    # Libraries print to stdout; replies keep the real one for themselves.
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def send(message: dict[str, Any]) -> None:
        replies.write(msgspec.json.encode(message) + b"\n")

    service = Service(send)
    decoder = msgspec.json.Decoder(Request)
    for line in sys.stdin.buffer:
        request = decoder.decode(line)
        try:
            service.answer(request)
        except Exception as error:
            traceback.print_exc()
            summary = f"{type(error).__name__}: {error}".splitlines()[0][:500]
            send({"id": request.id, "error": "died", "message": summary})
            return 1
    service.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
