import syncprims
steps = 8
class Batches:
    at = 0
    def __next__(self):
        self.at += 1
batches = Batches()
class Model(dict):
    def state_dict(self):
        return dict(self)
    load_state_dict = dict.update
model = Model(w=0)
def train_step(model, batch):
    if syncprims.current().epoch == 0 and batches.at == 4:
        raise syncprims.PeerLost("as if a rank were lost")
    model["w"] += syncprims.all_reduce(1)
