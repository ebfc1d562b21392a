"""Those of exercise 19, where ranks agree on who is alive; mutants.py says how to read it."""

TEXT = """
== who_is_alive | * one round | same | its message reaches
~ if self.rounds < self.world_size - 2: => if False:

== who_is_alive | * a round too few | same | 4 ranks, dead
~ self.world_size - 2 => self.world_size - 3

== who_is_alive | passes nothing on | same | goes on with
~ return self.dead => return self.own
~ self.dead |= message => self.dead = self.dead | message
--
        self.world_size, self.dead, self.rounds = world_size, set(dead), 0
++
        self.world_size, self.dead, self.rounds = world_size, set(dead), 0
        self.own = self.dead

== who_is_alive | * silence is death | same | goes on with
--
        self.world_size, self.dead, self.rounds = world_size, set(dead), 0
++
        self.world_size, self.dead, self.rounds = world_size, set(dead), 0
        self.rank = rank
--
        self.rounds += 1
++
        self.rounds += 1
        self.dead |= set(range(self.world_size)) - {self.rank, *messages}

== who_is_alive | stops when all say the same | same | goes on with
--
        if self.rounds < self.world_size - 2:
++
        if any(self.dead != one for one in messages.values()):

== who_is_alive | dead if all say so | noticed | goes on with
~ self.dead |= message => self.dead &= message

== who_is_alive | those who were heard last | same | goes on with
~ return set(range(self.world_size)) - self.dead => return {self.rank, *messages}
--
        self.world_size, self.dead, self.rounds = world_size, set(dead), 0
++
        self.world_size, self.dead, self.rounds = world_size, set(dead), 0
        self.rank = rank

== who_is_alive | waits for every rank | ends | has no result
~ if self.rounds < self.world_size - 2: => if len(messages) < self.world_size - 1:

== who_is_alive | names the dead | kept | and not with all that live
~ return set(range(self.world_size)) - self.dead => return self.dead

== who_is_alive | begins to count with 1 | kept | and not with all that live
~ set(range(self.world_size)) => set(range(1, self.world_size))

== who_is_alive | a majority of all | goes_on | may go on
~ [rank for rank in range(world_size) if rank not in dead] => list(range(world_size))

== who_is_alive | * both halves | one_group | both may go on
~ (2 * len(here) == len(others) and others[0] in here) => 2 * len(here) == len(others)

== who_is_alive | no half | goes_on | may go on
~  or (2 * len(here) == len(others) and others[0] in here) =>

== who_is_alive | the half with rank 0 | goes_on | may go on
~ others[0] in here => 0 in here

== who_is_alive | more than are known to be dead | one_group | both may go on
--
    return 2 * len(here) > len(others) or (2 * len(here) == len(others) and others[0] in here)
++
    return len(here) > len(dead)
"""
