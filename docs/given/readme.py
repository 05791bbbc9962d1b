loss = 0.5
config = {"lr": 0.1}
def prepare(folder):
    return folder
def train_step():
    pass
