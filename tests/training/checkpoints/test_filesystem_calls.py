"""Every call on the file system goes through the module with fault injection (strace)."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support import ROOT
from support.rank_environment import clean_environ

PACKAGE = ROOT / "syncprims" / "training" / "checkpoints"

#: What changes a file system, as the kernel calls it and as Python's `os` does.
CALLS = {
    "openat": "open", "open": "open", "creat": "open", "write": "write", "writev": "write",
    "pwrite64": "pwrite", "fsync": "fsync", "fdatasync": "fsync", "rename": "rename",
    "renameat": "rename", "renameat2": "rename", "unlink": "unlink", "unlinkat": "unlink",
    "rmdir": "rmdir", "mkdir": "mkdir", "mkdirat": "mkdir", "ftruncate": "other",
    "truncate": "other", "link": "other", "linkat": "other", "symlink": "other",
    "symlinkat": "other", "chmod": "other", "fchmod": "other", "fchmodat": "other",
    "fallocate": "other", "sendfile": "other", "copy_file_range": "other",
}  # fmt: skip
SCRIPT = """
import json, os, sys
sys.path.insert(0, sys.argv[2])
from support.file_faults import SETUPS, watched
seen = []
at = lambda number, name, args: seen.append(name)
root = sys.argv[1]
with watched(at):
    for name in ("single", "to-shards", "state", "state-behind"):
        for version in (1, 2, 3):
            SETUPS[f"{name}-1"].save(f"{root}/{name}", version)
json.dump(seen, open(sys.argv[3], "w"))
"""


def can_trace() -> bool:
    if shutil.which("strace") is None:
        return False
    tried = subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True, check=False)
    return tried.returncode == 0


@pytest.mark.skipif(not can_trace(), reason="needs strace, and leave to trace processes")
def test_strace_sees_the_calls_that_the_seam_sees_and_no_others(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    trace, seen = tmp_path / "trace", tmp_path / "seen"
    command = ["strace", "-f", "-y", "-o", str(trace), "-e", f"trace=?{',?'.join(CALLS)}"]
    command += [sys.executable, "-c", SCRIPT, str(root), str(Path(__file__).parents[2]), str(seen)]
    subprocess.run(command, check=True, env={**clean_environ(), "SYNCPRIMS_BACKEND": "single"})
    found: Counter[str] = Counter()
    for line in trace.read_text(errors="replace").splitlines():
        call = re.match(r"\d+ +(\w+)\(", line)
        if call and str(root) in line:
            name = CALLS[call[1]]
            found["rmdir" if "AT_REMOVEDIR" in line else name] += 1
    told = Counter(name for name in json.loads(seen.read_text()) if name in CALLS.values())
    told["open"] += json.loads(seen.read_text()).count("listdir")  # it opens the directory
    assert found["fsync"] > 20
    assert found == told


def test_nothing_but_the_seam_touches_files() -> None:
    for path in PACKAGE.glob("*.py"):
        if path.name == "filesystem.py":
            continue
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "open", path.name
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                allowed = {"fspath", "path", "PathLike", "curdir", "cpu_count"}
                assert node.value.id != "os" or node.attr in allowed, (path.name, node.attr)
                assert node.value.id != "Path", path.name
