"""Who is alive (40 minutes)

A rank has died. Some of the others have noticed, some have not yet, and before they train on they
have to agree on who is left: all on the same set, or one of them waits for a rank that is gone.

They talk in rounds. In each round every rank sends one message to all the others, and then hears
the messages of that round. More ranks may die meanwhile, at any moment: the message of a rank that
dies while it sends reaches some of the others and not the rest, and from then on it is silent. A
rank that has made up its mind is silent too.

                      round 1                           round 2
    rank 0    I know that 3 is dead  -> 1 only, dies
    rank 1    I know of nobody       -> 2               3 is dead   -> 2
    rank 2    I know of nobody       -> 1               I know ...  -> 1

After round 1 rank 1 knows what rank 2 does not. Whether one round is enough, whether "all messages
were the same" is a reason to stop, and what to make of a rank that was silent in the last round:
that is the exercise. The check tries every run of up to four ranks in which any of them die in any
round and in the middle of sending, and the worst ones of five.

Who dies while the others agree need not be left out: the next all-reduce raises an error then, and
they agree again. But nobody may be left out who lives.

The second part is about a cable. If it is cut, ranks live on both sides, and each side finds the
other one silent. ``may_go_on`` decides on each side by itself, and never may both go on: there
would be two models. docs/learn/24-survivors.md says what dpcore does.
"""


class Agreement:
    """One rank's part."""

    def __init__(self, rank, world_size, dead):
        """``dead`` is a set: of the ranks 0 to world_size - 1, those that this one knows are dead.
        They are dead; there may be others."""
        #: solution
        self.world_size, self.dead, self.rounds = world_size, set(dead), 0
        #: instead
        #| raise NotImplementedError("what does this rank have to remember?")
        #: end

    def message(self):
        """What this rank sends to all others in this round."""
        #: solution
        return self.dead
        #: instead
        #| raise NotImplementedError("what can the others not know?")
        #: end

    def hear(self, messages):
        """``messages`` are those of this round that came: {rank: its message}. Returns the set of
        ranks that go on, once this rank is sure of it, and None before."""
        #: solution
        for message in messages.values():
            self.dead |= message
        self.rounds += 1
        if self.rounds < self.world_size - 2:
            return None
        return set(range(self.world_size)) - self.dead
        #: instead
        #| raise NotImplementedError("what is new, and is it over?")
        #: end


def may_go_on(world_size, dead, here):
    """Whether the ranks in ``here`` may train on. They know that those in ``dead`` are dead (both
    are sets); all others are silent, and may be alive behind a cut cable.

    Of two ranks one goes on if it knows that the other is dead. Where ranks that are not known to
    be dead are cut into two halves, the one with the lowest of them goes on."""
    #: solution
    others = [rank for rank in range(world_size) if rank not in dead]
    return 2 * len(here) > len(others) or (2 * len(here) == len(others) and others[0] in here)
    #: instead
    #| raise NotImplementedError("could the others think the same?")
    #: end


#: hint
#| Pass on what you have heard, not only what you have noticed yourself. A rank that dies while it
#| sends leaves a difference behind, and if the one that got its message dies as well, so does it.
#: hint
#| A difference survives a round only if a rank dies in it. How many can die until only one is
#| left? In a round in which nobody dies, all get to know the same, and nothing new comes later.
#: hint
#| Unless you count silence as death: then each death in the last round is something new. What
#| ranks agree on is who was dead when they began.
#: hint
#| A majority cannot exist twice. Of which ranks, if some are known to be dead?
#: end
