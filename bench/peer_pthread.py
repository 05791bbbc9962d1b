"""Measure the process-shared barrier of C; the first argument is the number of ranks."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


def main() -> None:
    ranks, seconds = sys.argv[1], json.loads(sys.argv[2])["seconds"]
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "barrier")
        subprocess.run(["cc", "-O2", "-pthread", "-o", program, str(SOURCE)], check=True)

        def per_barrier(rounds: int) -> float:
            command = [program, ranks, str(rounds)]
            return float(subprocess.run(command, check=True, capture_output=True).stdout)

        figure = per_barrier(max(100, int(seconds * 1e6 / per_barrier(200))))
    print(json.dumps({"barrier": [figure]}))


if __name__ == "__main__":
    main()
