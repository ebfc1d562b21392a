"""Checks of the exercise beside this file."""

import pickle
from itertools import chain, combinations, product

from dpcore.school.exercise.judging import need

ALLOWED = ()
LARGEST = 5
MOST_DEATHS = 2  # while they agree


def subsets(ranks):
    ranks = sorted(ranks)
    return [set(some) for some in chain(*(combinations(ranks, n) for n in range(len(ranks) + 1)))]


def beginnings(world):
    """(who is dead, what each of the others knows of it)."""
    if world == LARGEST:  # one rank knows of one death
        others = range(world - 1)
        return [
            ({world - 1}, {r: {world - 1} if r == one else set() for r in others}) for one in others
        ]
    found = []
    for dead in subsets(range(world)):
        others = [rank for rank in range(world) if rank not in dead]
        if others:
            for known in product(subsets(dead), repeat=len(others)):
                found.append((dead, dict(zip(others, known, strict=True))))
    return found


def run(student, world, knows, dying):
    """{rank: the set that it arrived at, or None} of those that live, and the number of rounds."""
    ranks = {rank: student.Agreement(rank, world, set(known)) for rank, known in knows.items()}
    ended, rounds = {}, 0
    for number in range(world):
        talking = [rank for rank in ranks if rank not in ended]
        if not talking:
            break
        rounds += 1
        sent = {rank: pickle.dumps(ranks[rank].message()) for rank in talking}
        for rank in talking:
            if rank in dying and dying[rank][0] == number:
                del ranks[rank]
        for rank in talking:
            if rank in ranks:
                came = {
                    other: pickle.loads(message)
                    for other, message in sent.items()
                    if other != rank and (other in ranks or rank in dying[other][1])
                }
                found = ranks[rank].hear(came)
                if found is not None:
                    ended[rank] = set(found)
    return {rank: ended.get(rank) for rank in ranks}, rounds


def every_run(student, world, knows):
    """(who dies, what ``run`` gives), those with few deaths first.

    Who dies: {rank: (in which round, whom its last message reaches)}."""
    level = [{}]
    for _ in range(min(MOST_DEATHS + 1, len(knows))):
        more = []
        for dying in level:
            found, rounds = run(student, world, knows, dying)
            yield dying, found
            last = max(((number, rank) for rank, (number, _) in dying.items()), default=(0, -1))
            for number in range(last[0], rounds):
                for rank in set(knows) - set(dying):
                    if (number, rank) > last:
                        others = subsets(set(knows) - set(dying) - {rank})
                        more += [{**dying, rank: (number, reached)} for reached in others]
        level = more


def told(ranks):
    return ", ".join(map(str, sorted(ranks))) or "nobody"


def in_words(world, dead, knows, dying):
    noticed = [f"rank {rank} knows of {told(known)}" for rank, known in knows.items() if known]
    parts = [f"{world} ranks, dead at the start: {told(dead)}", *noticed]
    for rank, (number, reached) in sorted(dying.items(), key=lambda one: one[1][0]):
        parts.append(f"rank {rank} dies in round {number + 1}, its message reaches {told(reached)}")
    return "; ".join(parts)


def runs(on, student):
    """Of each thing that has to hold, the first run in which it does not."""
    wrong = {}
    for world in range(1, LARGEST + 1):
        for dead, knows in beginnings(world):
            for dying, found in every_run(student, world, knows):
                for what, words in problems(found, knows):
                    if what not in wrong:
                        wrong[what] = f"{in_words(world, dead, knows, dying)}: {words}"
    return wrong


def problems(found, knows):
    """(what does not hold, in which way) of the sets at which the ranks of a run arrive."""
    noticed = set().union(*(knows[rank] for rank in found))
    for rank, alive in found.items():
        if alive is None:
            yield "ends", f"rank {rank} has no result after as many rounds as there are ranks"
            return
        if noticed & alive:
            yield "noticed", f"rank {rank} goes on with {told(alive)}"
        if set(found) - alive:
            yield "kept", f"rank {rank} goes on with {told(alive)}, and not with all that live"
    if len({frozenset(alive) for alive in found.values()}) > 1:
        yield (
            "same",
            ", ".join(f"rank {rank} goes on with {told(alive)}" for rank, alive in found.items()),
        )


def check_same(lab):
    """All ranks that live arrive at the same set, whoever dies in whichever round."""
    need_none(lab, "same")


def check_noticed(lab):
    """Nobody is in it of whose death one of them knew."""
    need_none(lab, "noticed")


def check_kept(lab):
    """Every rank that lives is in it."""
    need_none(lab, "kept")


def check_ends(lab):
    """There are no more rounds than ranks."""
    need_none(lab, "ends")


def need_none(lab, what):
    (wrong,) = lab.ranks("runs", 1)
    need(what not in wrong, wrong.get(what, ""))


def splits(on, student):
    """[world, who is known to be dead, who is here, whether they may go on]."""
    return [
        [world, sorted(dead), sorted(here), bool(student.may_go_on(world, set(dead), set(here)))]
        for world in range(1, LARGEST + 1)
        for dead in subsets(range(world))
        for here in subsets(set(range(world)) - dead)
        if here
    ]


def check_one_group(lab):
    """Never may two groups go on side by side, though one knows of more deaths than the other."""
    (found,) = lab.ranks("splits", 1)
    going = [(world, set(dead), set(here)) for world, dead, here, goes in found if goes]
    for (world, dead, here), (other_world, others_dead, there) in combinations(going, 2):
        if world == other_world and not (here & there or dead & there or here & others_dead):
            need(
                False,
                f"of {world} ranks, both may go on: {told(here)} (known to be dead: {told(dead)}) "
                f"and {told(there)} (known to be dead: {told(others_dead)})",
            )


def check_goes_on(lab):
    """But one does, if it can be sure that no other will."""
    (found,) = lab.ranks("splits", 1)
    for world, dead, here, goes in found:
        others = [rank for rank in range(world) if rank not in dead]
        twice = 2 * len(here)
        must = twice > len(others) or (twice == len(others) and others[0] in here)
        words = f"{world} ranks, here: {told(here)}, known to be dead: {told(dead)}"
        need(goes or not must, f"{words}: may go on")
        need(must or not goes, f"{words}: may not go on")
