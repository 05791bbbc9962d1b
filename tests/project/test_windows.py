"""What works without the modules that Windows does not have."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.rank_environment import run_python

PROGRAM = """
import os, sys, importlib, types
for module in {loaded!r}:  # that cannot be imported once Linux says that it is Windows
    importlib.import_module(module)
for module in [m for n, m in sys.modules.items() if n.startswith("filelock.") and hasattr(m, "os")]:
    module.os = types.SimpleNamespace(**vars(os))  # it stays that of Linux
for module in ("fcntl", "termios", "resource", "pwd", "grp"):
    sys.modules[module] = None
sys.platform = "win32"
for name in (
    "register_at_fork", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_DIRECTORY", "pread", "preadv",
    "pwrite", "posix_fadvise", "sched_yield", "mkfifo", "killpg",
):
    delattr(os, name)
{body}
"""

CASES = {
    "a world of one": "import syncprims as sp; sp.barrier(); assert sp.all_reduce(2) == 2",
    "worlds of threads": """
import syncprims as sp
from syncprims.testing import explore, run_world
assert run_world(lambda: sp.all_reduce(sp.get_rank()), 3) == [3, 3, 3]
explore(sp.barrier, 2, strategy="all")
""",
    "the command": """
from syncprims.cli import main
for words in (["--help"], ["run", "--help"], ["env"]):
    try:
        assert main(words) == 0
    except SystemExit as end:
        assert end.code == 0
assert main(["run", "-n", "2", "script.py"]) == main(["who"]) == 2
""",
    "errors": """
import pytest, syncprims as sp
from syncprims.testing import run_world
with pytest.raises(sp.BackendUnavailable, match="use threads"):
    run_world(sp.barrier, 2, kind="processes")
os.environ.update(RANK="0", WORLD_SIZE="2")
with pytest.raises(sp.BackendUnavailable, match="on Windows, use WSL"):
    sp.init("file")
""",
    "the pytest plugin": """
import io, pytest
io._WindowsConsoleIO = ()  # no stream is one
with open("test_ranks.py", "w") as file:
    file.write('''
import pytest, syncprims as sp
from syncprims.testing import once_per_session
@pytest.mark.world(ranks=2)
def test_sum():
    assert sp.all_reduce(1) == 2
def test_once():
    assert once_per_session("one", lambda: 1) == 1
''')
assert pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:anyio", "test_ranks.py"]) == 0
""",
}
WITH_TORCH = {
    "checkpoints": """
from syncprims.training import load_state, save_state
model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
for _ in range(2):
    save_state("saved", {"m": model})
load_state("saved", {"m": other})
assert torch.equal(model.weight, other.weight)
""",
    "torch in worlds of threads": """
import torch.distributed as dist
from syncprims.testing import run_world
def program():
    dist.init_process_group("gloo")
    number = torch.ones(1)
    dist.all_reduce(number)
    return number.item()
assert run_world(program, 2, torch=True) == [2.0, 2.0]
""",
}


@pytest.mark.parametrize("case", [*CASES, *WITH_TORCH])
def test_it_works_without_modules_of_posix(tmp_path: Path, case: str) -> None:
    loaded, body = ["asyncio", "filelock", "numpy", "random", "shutil"], CASES.get(case, "")
    if case in WITH_TORCH:
        loaded += ["torch", "torch.distributed.nn.functional", "torch._dynamo", "safetensors.torch"]
        body = "import torch" + WITH_TORCH[case]
    program = PROGRAM.format(loaded=loaded, body=body)
    done = run_python("-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
