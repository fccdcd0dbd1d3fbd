"""Event file of TensorBoard: records of TFRecord, each a protobuf of scalars (apart: it loads an optional library).

Torch's writer has a thread that fails silently, and loses the newest steps in a kill.
"""

import errno
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from unpad.storage import make_folder
from unpad.storage.disk import NEW, check_held, file_mode

VERSION = "brain.Event:2"  # of the format


class Board:
    """A new event file; a record that cannot be written leaves the file as it was.

    Args:
        folder: made if missing, private in a private folder.
        purge_step: TensorBoard hides records of this step and later ones in earlier files; None hides nothing.

    Raises:
        OSError, DiskError: the file cannot be created or later written, or was deleted.
    """

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        make_folder(folder)
        # TensorBoard reads the files in the order of their names.
        seconds, rest = divmod(time.time_ns(), 10**9)
        path = folder / f"events.out.tfevents.{seconds:010d}.{rest:09d}.{socket.gethostname()}.{os.getpid()}"
        check_held(path)
        self._descriptor = os.open(path, NEW | os.O_APPEND, file_mode(path))
        self._records = RecordWriter(self)
        try:
            self._add(Event(wall_time=time.time(), file_version=VERSION))
            if purge_step is not None:
                begins = SessionLog(status=SessionLog.START)
                self._add(Event(wall_time=time.time(), step=purge_step, session_log=begins))
        except BaseException:
            os.close(self._descriptor)
            raise

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Add numbers of a step, by their names on the page."""
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._add(Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def write(self, data: bytes) -> None:
        """Write a record; for `RecordWriter`."""
        status = os.fstat(self._descriptor)
        if status.st_nlink == 0:
            raise OSError(errno.ENOENT, "the file was deleted while it was being written")
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except BaseException:
            with suppress(OSError):
                os.ftruncate(self._descriptor, status.st_size)  # TensorBoard reads no further than half a record
            raise

    def _add(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
