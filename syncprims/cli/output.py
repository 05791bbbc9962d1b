"""Pass on what ranks write, line by line, each with its rank in front.

One thread reads all pipes, and alone writes: the launcher never waits for the reader of its output.
The thread polls until no further pipe becomes readable, and then reads the readable pipes in the
order of the ranks. So output that follows from another rank's, as in `in_turn`, is never read
first.
"""

from __future__ import annotations

import collections
import json
import math
import os
import re
import select
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Literal, TextIO, TypeAlias

_LONGEST_LINE = 1 << 20  # bytes without an end of line, after which one is added
_END_OF_LINE = re.compile(rb"\r?\n")
#: The same, or of one state of a progress bar. A return that is last may belong to such an end.
_END_OF_STATE = re.compile(rb"\r?\n|\r(?!\Z)")
_STATE_EVERY = 1.0  # seconds between two states of one that are shown on a terminal, as lines
_LOOKS = 5  # at most, for what came before what has been seen
_PROMPT_PAUSE = 0.2  # seconds after which an unfinished line of rank 0 is shown
_UNREAD = 5.0  # seconds for which the launcher, once it is asked to end, waits for a reader

Stream: TypeAlias = Literal["stdout", "stderr"]


class OutputLost(OSError):
    """All ranks have succeeded, and part of their output could not be written."""


@dataclass(eq=False)
class Source:
    """One stream of one rank."""

    rank: int
    pipe: IO[bytes]
    stream: Stream
    log: IO[bytes] | None = None  #: gets all that comes, as it is
    tail: collections.deque[str] | None = None  #: gets the last lines
    begun: bytes = b""  #: a line that has not ended
    due: float = math.inf  #: when it is shown as far as it goes
    next_state: float = -math.inf  #: when the next state of a progress bar is shown


class Output:
    """The standard streams of the launcher, as the ranks use them.

    `interrupts` are the signals that have asked the launcher to end. With `facts`, each line is a
    JSON object that has them.
    """

    def __init__(
        self,
        stdout: TextIO,
        stderr: TextIO,
        interrupts: Sequence[int] = (),
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self._interrupts = interrupts
        self._facts = facts
        self._streams: dict[Stream, TextIO] = {"stdout": stdout, "stderr": stderr}
        # Two terminals are one, most likely; a file has a line of its own.
        self._terminals = {name for name, one in self._streams.items() if one.isatty()}
        #: What stands in the unfinished line of a stream, and whose it is.
        self._unfinished: dict[Stream, tuple[Source, bytes]] = {}
        self.error: OSError | None = None  #: what first kept the launcher from writing
        self._said = collections.deque[list[bytes]]()
        self._added = collections.deque[Source]()
        self._thread: threading.Thread | None = None
        self._bell = -1  # the thread looks when something is written there, and ends at its end

    def say(self, *lines: str) -> None:
        """Write lines of the launcher itself to the error stream, before or after others."""
        if not lines:
            return
        self._said.append([line.encode(errors="backslashreplace") for line in lines])
        if self._thread is None:
            self.forward([])
            self.finish()
        elif self._bell >= 0:
            os.write(self._bell, b".")

    def forward(self, sources: Iterable[Source]) -> None:
        """Start to pass on what comes from `sources`, in a thread of its own."""
        bell, self._bell = os.pipe()
        self._thread = threading.Thread(
            target=self._forward, args=(list(sources), bell), daemon=True
        )
        self._thread.start()

    def add(self, sources: Iterable[Source]) -> None:
        """Pass on what comes from these as well."""
        self._added.extend(sources)
        os.write(self._bell, b".")

    def finish(self) -> None:
        """Return when all that has come is written, however long the reader takes.

        If the launcher is asked to end, what is not read soon is lost.
        """
        if self._thread is None:
            return
        bell, self._bell = self._bell, -1
        os.close(bell)
        deadline = math.inf
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(0.1)
            if self._interrupts:
                deadline = min(deadline, time.monotonic() + _UNREAD)
        self._thread = None

    # -- the thread -----------------------------------------------------------------------------

    def _forward(self, sources: list[Source], bell: int) -> None:
        left = {source.pipe.fileno(): source for source in sources}  # in the order of the ranks
        poll = select.poll()  # `select` itself takes no descriptor from 1024 up
        for fd in (*left, bell):
            poll.register(fd, select.POLLIN)
        finishing = False  # what is in the pipes is all, though a lost process may hold them open
        while True:
            due = min((source.due for source in left.values()), default=math.inf)
            pause = None if due == math.inf else max(0.0, due - time.monotonic()) * 1000
            ready = poll.poll(0 if finishing else pause)
            for _ in range(_LOOKS):  # a pipe that became readable since may have been first
                if ready == (ready := poll.poll(0)):
                    break
            found = {fd for fd, _ in ready}
            for fd in [fd for fd in left if fd in found]:
                if not self._read(left[fd]):
                    poll.unregister(fd)
                    self._end(left.pop(fd))
            while self._added:
                source = self._added.popleft()
                left[source.pipe.fileno()] = source
                poll.register(source.pipe.fileno(), select.POLLIN)
            while self._said:
                self._show(None, self._said.popleft())
            if finishing and not found:
                break
            if bell in found and not os.read(bell, 4096):
                poll.unregister(bell)
                finishing = True
            for source in left.values():
                if source.due <= time.monotonic():
                    self._show_unfinished(source)
        for source in left.values():
            self._end(source)
        os.close(bell)

    def _read(self, source: Source) -> bool:
        """Read what has come and show what is complete; return whether more may come."""
        chunk = os.read(source.pipe.fileno(), 65536)
        if chunk:
            end = _END_OF_LINE if source.stream in self._terminals else _END_OF_STATE
            *lines, source.begun = end.split(source.begun + chunk)
            now = time.monotonic()
            if before := source.begun.rstrip(b"\r").rpartition(b"\r")[0]:  # it stands there no more
                source.begun = source.begun[len(before) :]
                if now >= source.next_state:
                    lines.append(before)
                    source.next_state = now + _STATE_EVERY
            if len(source.begun) > _LONGEST_LINE:
                lines, source.begun = [*lines, source.begun], b""
            self._show(source, lines)
            prompts = source.begun and not source.rank
            source.due = now + _PROMPT_PAUSE if prompts else math.inf
            if source.log is not None:
                try:
                    source.log.write(chunk)
                except OSError as error:
                    why = f"{error.strerror}, in {source.log.name}"
                    self.error = self.error or OSError(error.errno, why)
        return bool(chunk)

    def _end(self, source: Source) -> None:
        """Show all that is left: nothing more comes."""
        if source.begun:
            self._show(source, [source.begun])
        source.pipe.close()
        if source.log is not None:
            source.log.close()

    def _show(self, source: Source | None, lines: Sequence[bytes]) -> None:
        """Write complete lines of `source`, or of the launcher itself."""
        if not lines:
            return
        lines = [_last_state(line) for line in lines]
        if source is not None and source.tail is not None:
            source.tail.extend(line.decode(errors="replace") for line in lines)
        stream = "stderr" if source is None else source.stream
        data = b"".join(self._line(source, line) for line in lines)
        owner, text = self._unfinished.pop(self._place(stream), (None, b""))
        if owner is not None and owner is source and data.startswith(text):
            data = data[len(text) :]
        elif owner is not None:
            data = b"\n" + data
            owner.begun = owner.begun.removeprefix(text.removeprefix(_prefix(owner)))
        self._write(stream, data)

    def _show_unfinished(self, source: Source) -> None:
        """Write what `source` has of a line, such as a prompt; no line of JSON is unfinished."""
        source.due = math.inf
        if self._facts is None:
            place, text = self._place(source.stream), _prefix(source) + _last_state(source.begun)
            owner, shown = self._unfinished.get(place, (None, b""))
            self._unfinished[place] = source, text
            self._write(source.stream, text[len(shown) if owner is source else 0 :])

    def _place(self, stream: Stream) -> Stream:
        return "stdout" if len(self._terminals) > 1 else stream

    def _line(self, source: Source | None, line: bytes) -> bytes:
        prefix = _prefix(source)
        line = line.removeprefix(prefix)  # a line of `get_logger` begins with it
        if self._facts is None:
            return prefix + line + b"\n"
        rank, stream = (None, "stderr") if source is None else (source.rank, source.stream)
        about = {"time": round(time.time(), 3), "rank": rank, **self._facts, "stream": stream}
        return json.dumps({**about, "line": line.decode(errors="replace")}).encode() + b"\n"

    def _write(self, stream: Stream, data: bytes) -> None:
        try:
            # Not its buffer: nobody can flush that while a write waits.
            fd = self._streams[stream].fileno()
            while data:
                try:
                    data = data[os.write(fd, data) :]
                except BlockingIOError:  # who shares the stream may have made it non-blocking
                    poll = select.poll()
                    poll.register(fd, select.POLLOUT)
                    poll.poll()
        except OSError as error:
            # It is raised at the end: if the output were no longer read, the ranks would block.
            self.error = self.error or error


def _last_state(line: bytes) -> bytes:
    """Return what stands in a line: each state of a progress bar begins with a return."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _prefix(source: Source | None) -> bytes:
    return b"" if source is None else b"[rank %d] " % source.rank
