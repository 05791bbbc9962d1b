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
        "_pytest.python": {"Function._fixtureinfo": "gives the arguments of a test to each rank"},
        "_pytest.unittest": {"TestCaseFunction": "refuses methods of a unittest.TestCase"},
        "_pytest.runner": {"runtestprotocol": "runs a test on each rank"},
        "_pytest._code.code": {"TracebackEntry._rawentry": "shows where a rank has raised"},
        "_pytest.capture": {"CaptureManager._method": "leaves the output of ranks to the launcher"},
        "hypothesis.control": {"_current_build_context": "lets ranks note and assume"},
        "accelerate.state": {_STATES: "keeps Accelerate's state for each rank"},
    },
)
