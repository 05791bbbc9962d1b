"""Private names of Python, pytest and accelerate that test worlds read."""

from __future__ import annotations

from syncprims._system.upstream import PrivateNames

_PATCHES = "keeps the patches of each rank"
_MOCK = "_patch _patch._active_patches _patch_dict _patch_dict._original _patch_dict._patch_dict"
_STATES = "PartialState._shared_state AcceleratorState._shared_state GradientState._shared_state"

NAMES = PrivateNames(
    "testing",
    {
        "os": {"environ._data": "keeps the environment of each rank"},
        "warnings": {"_showwarnmsg_impl": "keeps catch_warnings() for each rank"},
        "unittest.mock": {_MOCK: _PATCHES},
        "_pytest.monkeypatch": {"MonkeyPatch._setattr MonkeyPatch._setitem": _PATCHES},
        "accelerate.state": {_STATES: "keeps Accelerate's state for each rank"},
    },
)
