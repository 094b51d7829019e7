"""A schedule of one's own, from its cells to a trained toy, in two processes on a CPU: python examples/minimal.py"""

import torch

from helixpipe.costs.by_hand import unit_costs
from helixpipe.draw.text import text_timeline
from helixpipe.lowering.lower import lower
from helixpipe.model import Microbatch
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import even_stages, model_pieces
from helixpipe.program.workload import uniform
from helixpipe.runtime.executor import Executor, Step
from helixpipe.runtime.transport import make_transport
from helixpipe.simulate.simulator import simulate

CELLS = ("0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3")  # a row a rank: stage, kind, microbatch
RANKS = tuple(tuple(Op(cell[1], int(cell[0]), int(cell[2])) for cell in row.split()) for row in CELLS)
PROGRAM = Program("mine", even_stages(2, num_stages=2), RANKS, uniform(4))
BATCH, LENGTH, SIZE = 2, 16, 32  # sequences of a microbatch, their tokens, and both the vocabulary and hidden channels
DATA = [Microbatch(t, (t + 1) % SIZE, torch.ones(t.shape)) for t in torch.arange(128).view(4, BATCH, LENGTH) % SIZE]
PARTS = {"embed": torch.nn.Embedding, "mlp": torch.nn.Linear, "head": torch.nn.Linear}  # other pieces do nothing here


class Toy(torch.nn.Module):
    """A model as the executor asks for: it can run consecutive pieces, and the shapes of what crosses a cut."""

    def __init__(self, pieces):
        super().__init__()
        self.payload_dtype = torch.float32
        torch.manual_seed(7)  # every rank draws all weights, and keeps those of its pieces
        drawn = {piece: PARTS[piece.kind](SIZE, SIZE) for piece in model_pieces(2) if piece.kind in PARTS}
        self.parts = torch.nn.ModuleDict({str(piece): drawn[piece] for piece in pieces if piece in drawn})

    def run(self, pieces, inputs, batch, context):
        parts = torch.nn.Sequential(*(self.parts[str(piece)] for piece in pieces if piece.kind in PARTS))
        hidden = parts(inputs[0] if inputs else batch.tokens)
        if pieces[-1].kind == "head":
            hidden = torch.nn.functional.cross_entropy(hidden.flatten(0, 1), batch.labels.flatten())
        return (hidden,)

    def payload_shapes(self, after, micro_batch_size, length):
        return (torch.Size((micro_batch_size, length, SIZE)),)


def train(rank, port):
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model, group = Toy(PROGRAM.pieces_of_rank(rank)), torch.distributed.group.WORLD
    executor, plan = Executor(rank, model, make_transport(group, torch.device("cpu"))), lower(PROGRAM)
    for number in range(5):
        losses, _ = executor.run(plan, Step(number, int, DATA.__getitem__, lambda i: torch.tensor(0.25), BATCH, LENGTH))
        torch.optim.SGD(model.parameters(), lr=1).step()
        model.zero_grad()
        if losses:  # on the rank with the head: one of each microbatch
            print(f"step {number}: loss {sum(each.value for each in losses) / 4:.6f}", flush=True)


if __name__ == "__main__":
    print(text_timeline(simulate(lower(PROGRAM), unit_costs()).timeline, width=120), flush=True)
    port = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port  # one that is free
    torch.multiprocessing.start_processes(train, (port,), nprocs=2, start_method="fork")
