"""A job that outlives ranks which a signal ends, from snapshots in memory.

The ranks that live leave their group and, without being started anew, make one without the replicas that have lost
ranks. A lost rank is started beside them and waits; when all of its replica do, and it is time, everybody leaves the
group again for one with all. Where ranks cannot leave (NCCL's, those that are still starting), or do not in time, all
processes are killed and started anew.
"""

from __future__ import annotations

import os
import time

from helixpipe.cli.ranks import Ranks, killed_sentence
from helixpipe.cli.replicas import Roster
from helixpipe.common.host_memory import ROOT, Hold, Stamp, folder_of, newest, remove
from helixpipe.common.output import complain

_IDLE_GROUPS = 3  # after so many in which no step was done, a job ends


class OutlivingJob:
    """job: its ranks, of which none is started yet. roster: of its replicas, which are all there."""

    def __init__(self, job: Ranks, roster: Roster):
        self._job, self._roster, self._layout = job, roster, roster.layout
        self._folder = folder_of(os.getpid())
        self._hold: Hold | None = None
        if ROOT.is_dir():  # else the training program says that it is not
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._hold = Hold(self._folder)
        self._members: list[int] = []
        self._before = Stamp(0, 0)  # the newest snapshot when the group began
        self._spares: set[int] = set()  # ranks that were started to wait until their replica joins

    def run(self) -> int:
        """Run the job until it ends by itself; return its status."""
        job, idle = self._job, 0
        try:
            self._begin(list(range(self._layout.replicas)))
            while True:
                end = job.wait(self._more_are_ready)
                if end is None:
                    idle, stays = 0, self._leave(join=True)
                    members = self._roster.members(time.monotonic(), self._ready(stays))
                    grows = len(members) > len(self._members)
                    joins = f"lost replicas join after step {newest(self._folder).step}."
                    complain(f"helixpipe: {joins if grows else self._going_on(members, stays)}")
                    self._begin(members)
                    continue
                idle = 0 if newest(self._folder).step > self._before.step else idle + 1
                if not end.killed or job.signalled or idle == _IDLE_GROUPS:
                    return job.tell(end)
                stays = self._leave()
                job.repeat()
                members = self._roster.members(time.monotonic(), self._ready(stays))
                said = killed_sentence(end.failed, -end.status, why=False)[:-1]
                complain(f"{said}: {self._going_on(members, stays)}")
                self._begin(members)
        finally:
            if self._hold is not None:
                self._hold.close()
            remove(self._folder)

    def _begin(self, members: list[int]) -> None:
        self._members, self._before = members, newest(self._folder)
        self._spares -= set(self._layout.ranks(members))
        self._job.begin(self._layout.ranks(members))

    def _going_on(self, members: list[int], stays: bool) -> str:
        ranks, everybody = (len(self._layout.ranks(each)) for each in (members, range(self._layout.replicas)))
        how = ", without a new start of those that live" if stays else ""
        return f"{ranks} of {everybody} ranks go on after step {newest(self._folder).step}{how}."

    def _leave(self, join: bool = False) -> bool:
        """Have the group's ranks leave it, or end; count replicas as lost that have lost ranks. Returns whether those
        that live have stayed as they are."""
        job = self._job
        stays = job.leave(join)
        lost = {self._layout.replica_of(rank) for rank in job.missing(self._layout.ranks(self._members))}
        if lost:
            self._roster.lose(lost, newest(self._folder), time.monotonic())
        if not stays:
            job.end()
        return stays

    def _ready(self, stays: bool) -> set[int] | None:
        """Return the replicas of which each rank has a process that waits or trains; None: those that train do not
        stay, so it makes no difference."""
        if not stays:
            return None
        training = set(self._layout.ranks(self._members)) - self._job.missing(self._layout.ranks(self._members))
        there = self._job.waiting() | training
        return {replica for replica in range(self._layout.replicas) if there.issuperset(self._layout.ranks([replica]))}

    def _more_are_ready(self) -> bool:
        """Whether more replicas can train than do, now that those have done a step; start ranks that are missing."""
        job, now = self._job, time.monotonic()
        if job.signalled:
            return False
        if stays := job.can_leave():
            for replica in sorted(set(range(self._layout.replicas)) - set(self._members)):
                self._start_spares(replica, now)
        more = len(self._roster.members(now, self._ready(stays))) > len(self._members)
        return more and newest(self._folder).step > self._before.step

    def _start_spares(self, replica: int, now: float) -> None:
        """Start the processes that a replica which is left out lacks; later, if they end before it joins."""
        missing = self._job.missing(self._layout.ranks([replica]))
        if missing & self._spares:
            self._roster.lose([replica], Stamp(0, 0), now)
            self._spares -= missing
        if self._roster.is_back(replica, now):
            self._spares |= missing
            try:
                for rank in missing:
                    self._job.start(rank)
            except OSError as error:  # no more processes or descriptors; the job goes on as it is
                complain(f"helixpipe: no lost rank can be started: {error.strerror}.")
                self._roster.lose([replica], Stamp(0, 0), now)
                self._spares -= missing
