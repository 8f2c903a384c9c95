"""Write TensorBoard's event files: the numbers of metrics.jsonl, and samples."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from sagetrain.training.callbacks import Callback, Position, RunStart
from sagetrain.training.writers import RowFile


class TensorBoard(Callback):
    """A callback that writes an event file itself, because the thread of SummaryWriter answers a full disk with a
    traceback of its own. If this file has steps that earlier files also have, TensorBoard ignores those in the earlier
    files."""

    def __init__(self) -> None:
        self._file: RowFile | None = None

    def on_start(self, start: RunStart) -> None:
        """Open a file in run_dir/tensorboard, on rank 0."""
        if not start.main:
            return
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        plugin = SummaryMetadata.PluginData(plugin_name="text")
        self._texts = partial(TensorProto, dtype=DT_STRING), SummaryMetadata(plugin_data=plugin)
        folder, now = start.run_dir / "tensorboard", time.time()
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = RowFile(folder / name, 60 * start.cfg.checkpoint.tolerate_minutes)
        self._writer = RecordWriter(self._file)
        first = start.position.step + 1
        self._write(Event(wall_time=now, step=first, file_version="brain.Event:2"))
        self._write(Event(wall_time=now, step=first, session_log=SessionLog(status=SessionLog.START)))

    def on_row(self, position: Position, values: Mapping[str, float]) -> None:
        """Write a scalar for each number."""
        summary = self._summary(value=[self._summary.Value(tag=k, simple_value=v) for k, v in values.items()])
        self._write(self._event(wall_time=time.time(), step=position.step, summary=summary))

    def on_sample(self, position: Position, number: int, prompt: str, text: str) -> None:
        """Write a text so that it is shown unchanged. TensorBoard renders Markdown, in which four spaces begin a block
        of code."""
        tensor, metadata = self._texts
        lines = "\n".join(f"    {line}" for line in (prompt + text).split("\n")).encode()
        value = self._summary.Value(tag=f"samples/{number}", metadata=metadata, tensor=tensor(string_val=[lines]))
        self._write(self._event(wall_time=time.time(), step=position.step, summary=self._summary(value=[value])))

    def on_end(self, position: Position, finished: bool) -> None:
        """Close the file."""
        if self._file:
            self._file.close()

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
