"""Values between ranks: objects, arrays, and the transports that carry them.

Here are all the sizes that decide how a value travels, in bytes.
"""

from __future__ import annotations

from typing import Any, TypeAlias

# Neither numpy nor torch need be installed, so checkers of types know nothing of what is theirs.
Array: TypeAlias = Any  #: an array of numpy, or a tensor of torch
DType: TypeAlias = Any  #: of an array
Out: TypeAlias = Any  #: what a result is written into: an array, several of them, or None
Value: TypeAlias = Any  #: what travels, or a part or a packed form of it

#: An array of fewer bytes is a part of its note. It is about what a small note holds.
LARGE = 1536
#: What a note holds of an object, where a board says no other limit: a larger one is an array of
#: bytes, and passes through memory of fixed size.
LARGEST_NOTE = 1 << 18
#: Slots of one board up to which one round is faster than dividing the work of a reduction: with up
#: to so many members, and with more. Each member then reads all slots.
FEW_MEMBERS, ONE_ROUND, ONE_ROUND_OF_MANY = 4, 2 << 20, 1 << 20
#: What is reduced and scattered, up to which it is faster to reduce all in one round than to
#: exchange parts in two.
REDUCED_WHOLE = 256 << 10
#: A broadcast up to which one piece is best: to read it while it is written saves less time than
#: more rounds cost.
ONE_PIECE = 1 << 20
#: A piece in shared memory: the others read it while the next one is written.
LEAST_PIECE, MOST_PIECE = 512 << 10, 2 << 20
#: What passes through an engine at a time: of one's own array, and of one that is broadcast.
ENGINE_PIECE, ENGINE_BROADCAST = 16 << 20, 256 << 20
#: Texts: what describes a value has to fit, with its label, into a cell of a board.
LONGEST_DESCRIPTION = 1024
