"""Pass on what ranks write, line by line, each with its rank in front.

One thread reads all pipes, and alone writes: the launcher never waits for the reader of its output.
The thread polls until no further pipe becomes readable, and then reads the readable pipes in the
order of the ranks. So output that follows from another rank's, as in `in_turn`, is never read
first. Only a traceback is held back briefly, so that its lines stay together.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import select
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, TextIO

_LONGEST_LINE = 1 << 20  # bytes without an end of line, after which one is added
_LOOKS = 5  # at most, for what came before what has been seen
_TRACEBACK = b"Traceback (most recent call last):"
#: Seconds without a new line after which a traceback is complete, and for which it is held at most.
_TRACEBACK_PAUSE, _LONGEST_HOLD = 0.1, 0.5
_MOST_TRACEBACKS = 100  # that are compared with those of other ranks
_PROMPT_PAUSE = 0.2  # seconds after which an unfinished line of rank 0 is shown
_UNREAD = 5.0  # seconds for which the launcher, once it is asked to end, waits for a reader
_ERASE = b"\r\x1b[K"  # the line of the cursor, on a terminal


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
    due: float = math.inf  #: when something that is held back is shown
    _after_return: bool = False  # the newline of a return may come in the next chunk
    _held: list[bytes] = field(default_factory=list[bytes])  # lines of a traceback
    _held_until: float = 0.0  # at the latest

    def read(self) -> bool:
        """Read what has come and show what is complete; return whether more may come."""
        chunk = os.read(self.pipe.fileno(), 65536)
        if chunk:
            self._take(chunk)
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
        self.show_held()
        if self.begun:
            self._show([self.begun])
        self.pipe.close()
        if self.log is not None:
            self.log.close()

    def _take(self, chunk: bytes) -> None:
        if self._after_return:
            chunk = chunk.removeprefix(b"\n")
        self._after_return = chunk.endswith(b"\r") and not self.sink.is_terminal
        chunk = chunk.replace(b"\r\n", b"\n")
        if not self.sink.is_terminal:
            chunk = chunk.replace(b"\r", b"\n")  # each state of a progress bar is a line
        *lines, begun = (self.begun + chunk).split(b"\n")
        if len(begun) > _LONGEST_LINE:
            lines, begun = [*lines, begun], b""
        if self._held or (self.tail is not None and any(_TRACEBACK in line for line in lines)):
            now = time.monotonic()
            self._held_until = self._held_until if self._held else now + _LONGEST_HOLD
            self._held += lines
            self.begun = begun
            self.due = min(now + _TRACEBACK_PAUSE, self._held_until)
            return
        if lines:
            self._show(lines)
        self.begun = begun
        self.due = math.inf
        if b"\r" in begun:
            *_, before, bar = begun.split(b"\r")
            self.begun = b"\r" + bar
            self.sink.show_unfinished(self, bar or before)
        elif begun and self.rank == 0:
            self.due = time.monotonic() + _PROMPT_PAUSE

    def show_held(self) -> None:
        """Show what has been held back long enough."""
        self.due = math.inf
        if self._held:
            lines, self._held = self._held, []
            self._show(lines, self.sink.shorten(self.rank, lines))
        elif self.rank == 0 and b"\r" not in self.begun:
            self.sink.show_unfinished(self, self.begun)

    def _show(self, lines: list[bytes], shortened: list[bytes] | None = None) -> None:
        if self.tail is not None:
            whole = (line.rpartition(b"\r")[2] for line in lines)
            self.tail.extend(line.decode(errors="replace") for line in whole)
        self.sink.write(self, [line.rpartition(b"\r")[2] for line in shortened or lines])


class _Screen:
    """The line with the cursor, of one terminal or file: whose unfinished text stands there."""

    def __init__(self) -> None:
        self.owner: Source | None = None
        self.text = b""


class Sink:
    """An output stream of the launcher."""

    def __init__(
        self, stream: TextIO, name: str, screen: _Screen, facts: Mapping[str, Any] | None
    ) -> None:
        self._stream = stream
        self._name = name
        self._screen = screen
        self._facts = facts
        self.is_terminal: bool = stream.isatty() and facts is None
        self.error: OSError | None = None  #: the first failed write
        self._tracebacks: dict[bytes, int] = {}  # that were shown, and which rank was the first

    def write(self, source: Source | None, lines: list[bytes]) -> None:
        """Write complete lines of `source`, or of the launcher itself."""
        screen = self._screen
        data = b"".join(self._line(source, line) for line in lines)
        if screen.owner is None:
            pass
        elif screen.owner is source and data.startswith(screen.text):
            data = data[len(screen.text) :]
        elif self.is_terminal:  # an unfinished line of another rank is drawn again below
            data = _ERASE + data + (b"" if screen.owner is source else screen.text)
        else:
            data = b"\n" + data
            shown = len(screen.text) - len(_prefix(screen.owner))
            screen.owner.begun = screen.owner.begun[shown:]  # that line goes on without this part
            screen.owner = None
        if screen.owner is source:
            screen.owner = None
        self._write(data)

    def shorten(self, rank: int, lines: list[bytes]) -> list[bytes]:
        """Return `lines`; a traceback that another rank has shown is one line. JSON is whole."""
        begin = next((at for at, line in enumerate(lines) if _TRACEBACK in line), len(lines))
        text = b"\n".join(lines[begin:])
        if len(self._tracebacks) >= _MOST_TRACEBACKS:
            self._tracebacks.clear()
        first = self._tracebacks.setdefault(text, rank)
        if not text or first == rank or self._facts is not None:
            return lines
        return [*lines[:begin], b"the same traceback as rank %d" % first]

    def _line(self, source: Source | None, line: bytes) -> bytes:
        prefix = _prefix(source)
        line = line.removeprefix(prefix)  # a line of `get_logger` begins with it
        if self._facts is None:
            return prefix + line + b"\n"
        rank, text = None if source is None else source.rank, line.decode(errors="replace")
        about = {"time": round(time.time(), 3), "rank": rank, **self._facts, "stream": self._name}
        return json.dumps({**about, "line": text}).encode() + b"\n"

    def show_unfinished(self, source: Source, text: bytes) -> None:
        """Show a line that has not ended: a prompt, or on a terminal the state of a progress bar.

        There is one such line on a terminal: that of the first rank to have one, or of rank 0.
        """
        screen = self._screen
        others = screen.owner not in (source, None) and source.rank
        if not text or others or self._facts is not None:
            return
        text = _prefix(source) + text
        if self.is_terminal:
            with contextlib.suppress(OSError):
                width = os.get_terminal_size(self._stream.fileno()).columns
                # A longer line cannot be erased.
                text = text.decode(errors="replace")[: width - 1].encode() if width else text
        if screen.owner is source and text.startswith(screen.text):
            data = text[len(screen.text) :]
        else:
            data = _ERASE + text if self.is_terminal else text
        screen.owner, screen.text = source, text
        self._write(data)

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
        screen = _Screen()
        self.stdout: Sink = Sink(stdout, "stdout", screen, facts)
        # Two terminals are one, most likely; a file has a line of its own.
        both = self.stdout.is_terminal and stderr.isatty()
        self.stderr: Sink = Sink(stderr, "stderr", screen if both else _Screen(), facts)
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
                    source.show_held()
        for source in left.values():
            source.end()
        os.close(bell)
