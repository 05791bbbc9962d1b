plain = DataLoader(torch.arange(5), 2)
def train_step(x):
    with accumulator.accumulate(model):
        accumulator.backward(model(x).sum(), weight=len(x))
