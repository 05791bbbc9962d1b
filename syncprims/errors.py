"""The errors of the library, and how an error travels from one rank to another.

Every error is a :class:`SyncError` and also the nearest builtin, so ``except TimeoutError`` works
as expected. Each carries its facts as attributes and pickles. :func:`dump` and :func:`load` carry
it in bytes, since one rank's verdict must read the same on every other rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeGuard

_LONGEST_NAME = 80


class Failure(NamedTuple):
    """One rank's exception, as the other ranks see it."""

    rank: int
    type: str
    message: str
    traceback: str
    consequence: bool = False  #: it failed only because another rank had failed
    handled: str = ""  #: headline of its own exception that it handled then, as in a ``finally``

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """Return `error` as text only, so that any exception can travel."""
        import traceback  # slow to import, and only a failure needs it

        name, message = describe(error)
        consequence, handled = False, ""
        try:
            own = _handled(error)
            consequence = own is not None
            if own is None:  # what an exit code is about, only the error says that was handled then
                own = chain_of(error)[1:] if isinstance(error, SystemExit) else []
            handled = _headline(*describe(own[0])) if own else ""
            text = "".join(traceback.format_exception(error))
        except BaseException as broken:  # a user's code, or there is no memory or no stack left
            text = f"<no traceback: to format it raised {type(broken).__name__}>"
        return cls(rank, name, _cut(message, 1500), _cut(text, 6000), consequence, handled)

    @property
    def headline(self) -> str:
        """``ValueError: bad value``, on one line, and what its rank handled then."""
        line = _headline(self.type, self.message)
        return f"{line.rstrip(':')}, while it handled {self.handled}" if self.handled else line


def describe(error: BaseException) -> tuple[str, str]:
    """Return the type and the text of any exception, whatever its own code does."""
    module, name = (type.__getattribute__(type(error), of) for of in ("__module__", "__qualname__"))
    if module not in ("builtins", "__main__"):
        name = f"{module}.{name}"
    try:
        text = str(error)
        if is_group(error):
            own = [leaf for leaf in leaves(error) if not is_consequence(leaf)] or leaves(error)
            text += ": " + "; ".join(_headline(*describe(leaf)) for leaf in own)
        return name, text
    except BaseException as broken:  # a user's __str__ must not hide the failure
        return name, f"<no text: its __str__ raised {type(broken).__name__}>"


def _headline(kind: str, message: str) -> str:
    first = message.strip().split("\n", 1)[0]
    return f"{kind}: {first}" if first else kind


def chain_of(error: BaseException, seen: Sequence[BaseException] = ()) -> list[BaseException]:
    """Return `error`, what it was raised from or while handling, and so on, without the `seen`."""
    chain: list[BaseException] = []
    known = {*map(id, seen)}
    link: BaseException | None = error
    while link is not None and id(link) not in known:
        known.add(id(link))
        chain.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return chain


def is_group(error: BaseException | None) -> TypeGuard[BaseExceptionGroup[BaseException]]:
    """Return whether `error` is a group of exceptions."""
    return isinstance(error, BaseExceptionGroup)


def leaves(error: BaseException | None) -> list[BaseException]:
    """Return `error`, or the exceptions in it if it is a group, as of tasks that run together."""
    found: list[BaseException] = []
    left = [error]
    while left:  # not by recursion: groups may be nested more deeply than calls
        one = left.pop()
        if is_group(one):
            left += reversed(one.exceptions)
        elif one is not None:
            found.append(one)
    return found


def is_consequence(error: BaseException) -> bool:
    """Return whether an error only reports that of another rank, or was raised over one that does.

    A group is one if all in it are. What a program asserts while it handles such an error is its
    own, and no consequence.
    """
    return _handled(error) is not None


def _handled(
    error: BaseException, seen: Sequence[BaseException] = ()
) -> list[BaseException] | None:
    """Return which exceptions of its own a rank handled then; None if it is no consequence."""
    chain = [] if isinstance(error, AssertionError) else chain_of(error, seen)
    for at, link in enumerate(chain):
        if isinstance(link, TORN):
            return [other for other in chain[at:] if not isinstance(other, TORN)]
        if is_group(link):  # an exception in it may have been raised while it was handled
            parts = [_handled(member, (*seen, *chain)) for member in link.exceptions]
            if None not in parts:
                return [one for part in parts if part for one in part]
    return None


def _cut(text: str, most: int) -> str:
    """Return `text`, without its middle if it is longer than `most` characters."""
    if len(text) <= most:
        return text
    head, tail = text[: most // 3], text[-(most - most // 3) :]
    return f"{head}\n... {len(text) - most} characters left out ...\n{tail}"


class SyncError(Exception):
    """The root: every error of this library, with its facts as attributes.

    Facts that do not apply to an error keep their empty value.
    """

    rank: int | None = None  #: the rank it is about
    call: str | None = None  #: the call it happened in, as ``barrier 'epoch end' (train.py:41)``
    missing: list[int]  #: ranks that did not come
    arrived: list[int]  #: ranks that did
    waited: float | None = None  #: seconds
    failures: dict[int, Failure]  #: what the failed ranks raised

    def __init__(
        self,
        message: str = "",
        *,
        rank: int | None = None,
        call: str | None = None,
        missing: list[int] | None = None,
        arrived: list[int] | None = None,
        waited: float | None = None,
        failures: dict[int, Failure] | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.call = call
        self.missing = missing or []
        self.arrived = arrived or []
        self.waited = waited
        self.failures = failures or {}

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""

    def facts(self) -> dict[str, Any]:
        """Return the keyword arguments that make an equal error."""
        names = ("rank", "call", "missing", "arrived", "waited", "failures")
        return {name: getattr(self, name) for name in names}

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self.facts()), (str(self),)


class ConfigurationError(SyncError, ValueError):
    """The environment or the arguments contradict themselves or each other."""


class BackendUnavailable(SyncError, ImportError):
    """The chosen backend cannot work here; the message says what to install or choose."""


class WorldClosed(SyncError, RuntimeError):
    """A primitive was called after :func:`syncprims.shutdown`."""


class ForkedProcess(SyncError, RuntimeError):
    """A primitive was called in a forked child, which is not a rank."""


class ConcurrentCall(SyncError, RuntimeError):
    """Two threads called primitives of one group at once."""


class EncodingError(SyncError, TypeError):
    """An object cannot travel between ranks."""


class CollectiveMismatch(SyncError, RuntimeError):
    """Ranks met in different calls."""


class RankMismatch(SyncError, ValueError):
    """Ranks met in the same call with values that do not fit together."""


class SyncTimeout(SyncError, TimeoutError):
    """Some ranks did not come in time."""


class PeerLost(SyncError, ConnectionError):
    """A rank is gone: killed, or finished while others still wait for it.

    Or two hosts do not reach each other, and ranks there cannot exchange data; ``.rank`` is None.
    """

    @classmethod
    def before_start(
        cls, rank: int, how: str, joined: bool, *, waiting: int, call: str
    ) -> PeerLost:
        """Return the error that `rank` has ended, and rank `waiting` waits for it to join.

        :param joined: it has joined an earlier world of the run, or waited for this one and left.
        :param call: the call that starts the world of the rank that waits.
        """
        ended = f"ended ({how})" if how else "ended"
        ended = f"joined and {ended}" if joined else f"{ended} before its first call"
        return cls(
            f"rank {rank} {ended}, while rank {waiting} is in {call}\n"
            f"Look at the output of rank {rank}. If it ended as it should, it made fewer calls "
            f"than the others: look for a branch or an early return that differs between ranks.",
            rank=rank,
            call=call,
        )


class Evicted(SyncError, ConnectionError):
    """The other hosts have gone on without this one, in a `reform` that it did not reach."""


class PeerFailed(SyncError, RuntimeError):
    """A rank raised; :attr:`failures` has its exception's type, message and traceback."""

    @classmethod
    def from_failure(
        cls, failure: Failure, call: str | None = None, *, waiting: str | None = None
    ) -> PeerFailed:
        """Return the error that the other ranks raise for `failure`.

        `call` is where it failed, if that was a call of all; `waiting` the call of the others.
        """
        where = f" in {call}" if call else f", while others wait in {waiting}" if waiting else ""
        message = f"rank {failure.rank} failed{where}: {failure.headline}"
        if failure.traceback:
            quoted = "\n".join(f"  | {line}" for line in failure.traceback.rstrip().splitlines())
            message += f"\n  traceback of rank {failure.rank}:\n{quoted}\n"
            message += f"Fix what rank {failure.rank} raised; this rank only reports it."
        else:
            message += f"\nSee the output of rank {failure.rank}; this rank only reports it."
        return cls(
            message, rank=failure.rank, call=call or waiting, failures={failure.rank: failure}
        )


class SyncWarning(UserWarning):
    """The root of the warnings of worlds of tests."""


class UnequalCallSites(SyncWarning):
    """Ranks of a test have met in calls without a name from different lines.

    They may be different calls: only their lines tell them apart.
    """


class CheckpointError(SyncError, OSError):
    """A checkpoint could not be written completely, or was changed after it was written.

    Like every OSError it has :attr:`filename`, and :attr:`errno` where the system gave one.
    """

    def __init__(
        self, message: str = "", *, path: str | None = None, errno: int | None = None, **facts: Any
    ) -> None:
        super().__init__(message, **facts)
        self.filename: str | None = path
        self.errno: int | None = errno

    def facts(self) -> dict[str, Any]:
        """Return the keyword arguments that make an equal error."""
        return {**super().facts(), "path": self.filename, "errno": self.errno}


class SharedMemoryError(SyncError, OSError):
    """The system refused this rank a file in which ranks of one host meet: no space, for example.

    Its :attr:`errno` is that of the system, on the rank that met it.
    """


#: Errors after which a group is torn: such an error is a consequence, not a cause.
TORN = (CollectiveMismatch, SyncTimeout, PeerLost, PeerFailed)


#: No dumped error is longer, so that a backend can reserve space for one.
LONGEST_DUMP = 12 * 1024


def format_ranks(members: Iterable[int]) -> str:
    """Return ranks as ``0-3,8``."""
    spans: list[tuple[int, int]] = []
    for rank in members:
        if spans and rank == spans[-1][1] + 1:
            spans[-1] = spans[-1][0], rank
        else:
            spans.append((rank, rank))
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in spans)


def parse_ranks(text: str) -> list[int]:
    """Return the ranks that :func:`format_ranks` wrote."""
    found: list[int] = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def name_ranks(members: Sequence[int]) -> str:
    """Return a short text that no other ranks have: ``[0, 1]``, or for many ``[0-63]``."""
    name = str(list(members))
    if len(name) > _LONGEST_NAME:
        name = f"[{format_ranks(members)}]"
    if len(name) > _LONGEST_NAME:
        import hashlib  # slow to import, and rarely needed

        digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
        head = name[:40].rpartition(",")[0]
        name = f"{head},...,{members[-1]}] ({len(members)}, digest {digest})"
    return name


def dump(error: SyncError, longest: int = LONGEST_DUMP) -> bytes:
    """Return `error` as at most `longest` bytes; long texts and lists are cut."""
    import json  # slow to import

    for most in (8000, 4000, 2000, 1000, 500, 200, 50):
        facts = error.facts()
        for name in ("missing", "arrived"):
            ranks = format_ranks(facts[name])
            facts[name] = ranks if len(ranks) <= most else ranks[:most].rpartition(",")[0]
        facts["failures"] = [
            (f.rank, _cut(f.type, most), _cut(f.message, most), _cut(f.traceback, most), *f[4:])
            for f in list(error.failures.values())[: most // 50]
        ]
        fields = [type(error).__name__, _cut(str(error), most), facts]
        data = json.dumps(fields, ensure_ascii=False).encode(errors="backslashreplace")
        if len(data) <= longest:
            break
    return data


def load(data: bytes) -> SyncError:
    """Return the error that :func:`dump` wrote; damaged bytes give an error that says so."""
    import json

    try:
        name, message, facts = json.loads(data)
        facts["missing"] = parse_ranks(facts["missing"])
        facts["arrived"] = parse_ranks(facts["arrived"])
        failures = [Failure(*fields) for fields in facts["failures"]]
        facts["failures"] = {failure.rank: failure for failure in failures}
        return _KINDS.get(name, SyncError)(message, **facts)
    except (ValueError, TypeError, KeyError):
        return SyncError(
            "the group is broken, and the message that says why was lost; look at the output of "
            "the other ranks"
        )


_KINDS: dict[str, type[SyncError]] = {kind.__name__: kind for kind in SyncError.__subclasses__()}
for _kind in (SyncError, SyncWarning, UnequalCallSites, *_KINDS.values()):
    _kind.__module__ = "syncprims"  # tracebacks show the name that users import


def install(extra: str) -> str:
    """Return how to install the libraries of an extra; the package itself is not published yet."""
    return f"pip install '.[{extra}]' in the checkout of syncprims"


def describe_exit(status: int | None) -> str:
    """Return ``killed by SIGKILL``, ``exit code 3``, or that it is not known.

    `status` is as :func:`os.waitstatus_to_exitcode` returns it.
    """
    if status is None:
        return "its process is gone, how is not known"
    if status >= 0:
        return f"exit code {status}"
    return f"killed by {signal_name(-status)}"


def signal_name(number: int) -> str:
    """Return ``SIGTERM``, or ``signal 35`` for one without a name."""
    import signal  # slow to import

    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
