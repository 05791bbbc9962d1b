"""Count the words of a text on several ranks."""

from __future__ import annotations

from .counting import count_words as count_words
from .counting import prepared as prepared
from .stopping import until_common as until_common
