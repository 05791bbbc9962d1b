import torch
from syncprims import get_rank
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps = 30
def train_step():
    if progress.done == 20:
        import os, signal
        os.kill(os.getpid(), signal.SIGTERM)
class Progress:
    done = 0
    def state_dict(self):
        return {"done": self.done}
    def load_state_dict(self, state):
        self.done = state["done"]
progress = Progress()
