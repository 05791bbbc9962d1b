"""The result is the same on any number of ranks, as threads and as processes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from wordcount import count_words, prepared

from syncprims import PeerFailed, get_rank

if TYPE_CHECKING:
    from pathlib import Path

TEXT = "the cat sat\non the mat\nThe end\nof the cat\nand of the mat"
WORDS = Counter(TEXT.lower().split())

# The body of a marked test runs on every rank. Fixtures run once, outside the ranks.
everywhere = pytest.mark.world(ranks=[1, 2, 3, 4], kind=["threads", "processes"])


@everywhere
def test_every_rank_has_the_whole_count() -> None:
    assert count_words(TEXT.splitlines()) == WORDS


@everywhere
def test_more_ranks_than_lines() -> None:
    assert count_words(["one line"]) == Counter(["one", "line"])


@everywhere
def test_only_one_rank_downloads(tmp_path: Path) -> None:
    def download() -> str:
        (tmp_path / f"downloaded by {get_rank()}").touch(exist_ok=False)
        return TEXT

    assert prepared(tmp_path / "text", download) == TEXT.splitlines()
    assert [path.name for path in tmp_path.glob("downloaded*")] == ["downloaded by 0"]


@pytest.mark.world(ranks=3)
def test_if_the_download_fails_every_rank_is_told(tmp_path: Path) -> None:
    def download() -> str:
        raise ConnectionError("no route")

    # Rank 0 raises its own exception; the others raise one that names rank 0.
    with pytest.raises(ConnectionError if get_rank() == 0 else PeerFailed, match="no route"):
        prepared(tmp_path / "text", download)
