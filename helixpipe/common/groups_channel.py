"""What `helixpipe train` and each of its ranks tell each other, so that ranks outlive others: lines over a socket pair.

    a rank      stays    its group can be left, and the rank go on in another one, from now on
                waits    it is in no group, and waits to be told of one
    launcher    leave    leave the group, whatever goes on in it: ranks of it have died
                join     leave it, soon: nobody has died, and others join
                {...}    the variables of the group to join: RANK, WORLD_SIZE, MASTER_PORT, …

The launcher tells a rank of a group only when it waits, and has it leave none before it has said that it stays.
"""

from __future__ import annotations

VARIABLE = "HELIXPIPE_GROUPS"
"""The descriptor of a rank's end. A rank without RANK in its environment waits for its first group."""

STAYS, WAITS, LEAVE, JOIN = "stays", "waits", "leave", "join"
