"""Those of exercise 18, where a task is to find a mistake; mutants.py says how to read it."""

TEXT = """
== find_the_mistake | * sends nothing | windows | train_in_windows, rank 0, at the end
~ is_sent = ends_here => is_sent = False

== find_the_mistake | sends the last window alone | windows | train_in_windows, rank 0
~ is_sent = ends_here => is_sent = number == len(batches) - 1

== find_the_mistake | sends the one after | windows | train_in_windows, rank 0
~ is_sent = ends_here => is_sent = number % WINDOW == 0

== find_the_mistake | sends on one rank of two, by its number | windows | rank
~ is_sent = ends_here => is_sent = ends_here and comm.rank == 0

== find_the_mistake | averages a sum | windows | train_in_windows, rank 0, at the end
~ (loss_of(wrapped, x, y) / WINDOW) => (loss_of(wrapped, x, y))

== find_the_mistake | * halves more on rank 1 | schedule | train_with_a_schedule, rank 0
~ optimizer.param_groups[0]["lr"] /= 2 => optimizer.param_groups[0]["lr"] /= 2 ** (1 + comm.rank)

== find_the_mistake | a step later on rank 1 | schedule | train_with_a_schedule, rank 0
~ if number % 2 == 1: => if number % 2 == (comm.rank == 0):

== find_the_mistake | logs nothing | schedule | rank 0 returns []
~ if comm.rank == 0: => if comm.rank == comm.world_size:

== find_the_mistake | every rank halves never | schedule | train_with_a_schedule, rank 0
~ optimizer.param_groups[0]["lr"] /= 2 => optimizer.param_groups[0]["lr"] /= 1

== find_the_mistake | the other rank loads | resume | resume, rank
--
    model.load_state_dict(torch.load(path))
++
    if comm.rank == 1:
        model.load_state_dict(torch.load(path))

== find_the_mistake | nobody loads | resume | resume, rank 0, at the end
~     model.load_state_dict(torch.load(path)) =>     torch.load(path)

== find_the_mistake | the mean decides | outliers | train_without_outliers, rank 0
~ comm.all_reduce(worst, "max") => comm.all_reduce(worst, "mean")

== find_the_mistake | * rank 0 decides | outliers | train_without_outliers, rank 0
~ comm.all_reduce(worst, "max") => comm.broadcast(worst, 0)

== find_the_mistake | the best loss decides | outliers | train_without_outliers, rank 0
~ comm.all_reduce(worst, "max") => comm.all_reduce(worst, "min")
"""
