"""Private names of Python, pytest and accelerate that test worlds read."""

from __future__ import annotations

from syncprims._system.upstream import PrivateNames

_ACCELERATE = "keeps Accelerate's state for each rank"

NAMES = PrivateNames(
    "testing",
    {
        "os": {"environ._data": "keeps the environment of each rank"},
        "warnings": {"_showwarnmsg_impl": "keeps catch_warnings() for each rank"},
        "unittest.mock": {
            "_patch": "keeps the patches of each rank",
            "_patch._active_patches": "keeps the patches of each rank",
            "_patch_dict": "keeps the patches of each rank",
            "_patch_dict._original": "keeps the patches of each rank",
            "_patch_dict._patch_dict": "keeps the patches of each rank",
        },
        "_pytest.monkeypatch": {
            "MonkeyPatch._setattr": "keeps the patches of each rank",
            "MonkeyPatch._setitem": "keeps the patches of each rank",
        },
        "accelerate.state": {
            "PartialState._shared_state": _ACCELERATE,
            "AcceleratorState._shared_state": _ACCELERATE,
            "GradientState._shared_state": _ACCELERATE,
        },
    },
)
