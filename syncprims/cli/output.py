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
from typing import IO, Any, TextIO

_LONGEST_LINE = 1 << 20  # bytes without an end of line, after which one is added
#: Ends a line. A progress bar begins each state with a return; one that is last may begin \r\n.
_END_OF_LINE = re.compile(rb"\r?\n|\r(?!\Z)")
_LOOKS = 5  # at most, for what came before what has been seen
_PROMPT_PAUSE = 0.2  # seconds after which an unfinished line of rank 0 is shown
_UNREAD = 5.0  # seconds for which the launcher, once it is asked to end, waits for a reader


class OutputLost(OSError):
    """All ranks have succeeded, and part of their output could not be written."""


@dataclass(eq=False)
class Source:
    """One stream of one rank."""

    rank: int
    pipe: IO[bytes]
    sink: Sink
    log: IO[bytes] | None = None  #: gets all that comes, as it is
    tail: collections.deque[str] | None = None  #: gets the last lines
    begun: bytes = b""  #: a line that has not ended
    due: float = math.inf  #: when it is shown as far as it goes

    def read(self) -> bool:
        """Read what has come and show what is complete; return whether more may come."""
        chunk = os.read(self.pipe.fileno(), 65536)
        if chunk:
            *lines, self.begun = _END_OF_LINE.split(self.begun + chunk)
            if len(self.begun) > _LONGEST_LINE:
                lines, self.begun = [*lines, self.begun], b""
            self._show(lines)
            prompts = self.begun and not self.rank
            self.due = time.monotonic() + _PROMPT_PAUSE if prompts else math.inf
            self._keep(chunk)
        return bool(chunk)

    def _keep(self, chunk: bytes) -> None:
        if self.log is not None:
            try:
                self.log.write(chunk)
            except OSError as error:
                why = f"{error.strerror}, in {self.log.name}"
                self.sink.error = self.sink.error or OSError(error.errno, why)

    def end(self) -> None:
        """Show all that is left: nothing more comes."""
        if self.begun:
            self._show([self.begun.rstrip(b"\r")])
        self.pipe.close()
        if self.log is not None:
            self.log.close()

    def show_unfinished(self) -> None:
        """Show a line that has not ended, such as a prompt."""
        self.due = math.inf
        self.sink.write_unfinished(self)

    def _show(self, lines: list[bytes]) -> None:
        if lines:
            if self.tail is not None:
                self.tail.extend(line.decode(errors="replace") for line in lines)
            self.sink.write(self, lines)


class _Unfinished:
    """The unfinished line that stands at the end of one terminal or file."""

    source: Source | None = None
    text = b""


class Sink:
    """An output stream of the launcher."""

    def __init__(
        self, stream: TextIO, name: str, unfinished: _Unfinished, facts: Mapping[str, Any] | None
    ) -> None:
        self._stream = stream
        self._name = name
        self._unfinished = unfinished
        self._facts = facts
        self.error: OSError | None = None  #: the first failed write

    def write(self, source: Source | None, lines: list[bytes]) -> None:
        """Write complete lines of `source`, or of the launcher itself."""
        data = b"".join(self._line(source, line) for line in lines)
        last = self._unfinished
        if last.source is not None and last.source is source and data.startswith(last.text):
            data = data[len(last.text) :]
        elif last.source is not None:
            data = b"\n" + data
            shown = len(last.text) - len(_prefix(last.source))
            last.source.begun = last.source.begun[shown:]  # the line goes on without this part
        last.source = None
        self._write(data)

    def write_unfinished(self, source: Source) -> None:
        """Write what `source` has of a line that has not ended; no line of JSON is unfinished."""
        last = self._unfinished
        if self._facts is None:
            text = _prefix(source) + source.begun.rstrip(b"\r")
            shown = len(last.text) if last.source is source else 0
            last.source, last.text = source, text
            self._write(text[shown:])

    def _line(self, source: Source | None, line: bytes) -> bytes:
        prefix = _prefix(source)
        line = line.removeprefix(prefix)  # a line of `get_logger` begins with it
        if self._facts is None:
            return prefix + line + b"\n"
        rank, text = None if source is None else source.rank, line.decode(errors="replace")
        about = {"time": round(time.time(), 3), "rank": rank, **self._facts, "stream": self._name}
        return json.dumps({**about, "line": text}).encode() + b"\n"

    def _write(self, data: bytes) -> None:
        try:
            fd = self._stream.fileno()  # not its buffer: nobody can flush that while a write waits
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


def _prefix(source: Source | None) -> bytes:
    return b"" if source is None else b"[rank %d] " % source.rank


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
        line = _Unfinished()
        self.stdout: Sink = Sink(stdout, "stdout", line, facts)
        # Two terminals are one, most likely; a file has a line of its own.
        both = stdout.isatty() and stderr.isatty()
        self.stderr: Sink = Sink(stderr, "stderr", line if both else _Unfinished(), facts)
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

    @property
    def error(self) -> OSError | None:
        """What kept the launcher from writing, if anything did."""
        return self.stdout.error or self.stderr.error

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
                if not left[fd].read():
                    poll.unregister(fd)
                    left.pop(fd).end()
            while self._added:
                source = self._added.popleft()
                left[source.pipe.fileno()] = source
                poll.register(source.pipe.fileno(), select.POLLIN)
            while self._said:
                self.stderr.write(None, self._said.popleft())
            if finishing and not found:
                break
            if bell in found and not os.read(bell, 4096):
                poll.unregister(bell)
                finishing = True
            now = time.monotonic()
            for source in left.values():
                if source.due <= now:
                    source.show_unfinished()
        for source in left.values():
            source.end()
        os.close(bell)
