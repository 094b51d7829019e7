"""torch's deferred receives stop: python docs/upstream/deferred_receives.py (no process group and no GPU is needed)."""

from types import SimpleNamespace

from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

common = {"num_stages": 4, "group_size": 2, "group_rank": 0, "submod": None, "has_backward": True}
stages = [SimpleNamespace(stage_index=i, is_first=i == 0, is_last=False, **common) for i in range(2)]
schedule = ScheduleInterleaved1F1B(stages, 4, lambda *_: None, defer_pp_recv=True)
rows = {rank: [str(action) for action in row] for rank, row in schedule.pipeline_order_with_comms.items()}
queues, moved = ([], []), True  # of both ranks, for all they send each other: NCCL's communicator of two ranks
while moved:
    moved = False
    for rank, row in rows.items():  # a host posts sends and receives without waiting; an op waits for its receive
        while row and not {row[0].replace("F", "RECV_F"), row[0].replace("B", "RECV_B")} & set(queues[rank]):
            queues[rank].extend([cell for cell in [row.pop(0)] if "SEND" in cell or "RECV" in cell])
            moved = True
    if all(queues) and ("SEND" in queues[0][0]) != ("SEND" in queues[1][0]):  # one sends, the other receives
        moved = bool(queues[0].pop(0) and queues[1].pop(0))
for rank, row in rows.items():
    print(f"rank {rank}: at {(row or ['end'])[0]}, head of its queue {(queues[rank] or ['nothing'])[0]}")  # noqa: T201
