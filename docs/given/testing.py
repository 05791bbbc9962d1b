import json
from pathlib import Path
from syncprims import all_reduce, barrier, is_main
def train_once():
    for _ in range(3):
        all_reduce(1.0)
def save():
    all_reduce(1.0)
    if is_main():
        Path("fresh.json").write_text("{}")
        Path("fresh.json").rename("model.json")
    barrier("saved")
def load(path):
    return json.loads(Path(path).read_text()) if Path(path).exists() else None
