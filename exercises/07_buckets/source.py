"""A plan of buckets (20 minutes)

One operation per gradient costs too many latencies, one for all of them begins too late. So
gradients travel together in buckets. A plan says which ones: a list of buckets, each a list of
numbers of parameters, in the order in which the buckets will be sent.

* Backward makes the gradients of the last layer first, so the plan goes from the last parameter
  to the first.
* A bucket is closed as soon as it holds its cap of bytes or more: the parameter that reaches the
  cap still belongs to it. Nothing is cut in two.
* The first bucket has a cap of its own. torch takes 1 MiB for it and 25 MiB for the others: the
  network has nothing to do until the first bucket is full, so that one should be small.

With sizes [400, 40, 400, 40] in bytes, a first cap of 40 and a cap of 400, the plan is
[[3], [2], [1, 0]].

A bucket is one flat piece of memory. Its gradients lie in it one after the other, in the order of
the plan, and ``offsets`` says where each begins. docs/learn/5-buckets.md says what the size of
buckets does to a step.
"""


def plan_buckets(sizes, first_cap, cap):
    """The buckets, each a list of numbers of parameters. ``sizes`` and the caps are bytes, and
    ``sizes`` stays as it is."""
    #: solution
    buckets, open_bucket, room = [], [], first_cap
    for parameter in reversed(range(len(sizes))):
        open_bucket.append(parameter)
        room -= sizes[parameter]
        if room <= 0:
            buckets.append(open_bucket)
            open_bucket, room = [], cap
    if open_bucket:
        buckets.append(open_bucket)
    return buckets
    #: instead
    #| raise NotImplementedError("which parameters travel together?")
    #: end


def offsets(sizes, bucket):
    """Where each parameter of a bucket begins in its memory: a dictionary from its number to a
    number of bytes."""
    #: solution
    found, place = {}, 0
    for parameter in bucket:
        found[parameter] = place
        place += sizes[parameter]
    return found
    #: instead
    #| raise NotImplementedError("where does each parameter begin?")
    #: end


#: hint
#| Walk over `reversed(range(len(sizes)))` with an open bucket and the room that is left in it. When
#| the room is used up, close the bucket and open the next.
#: hint
#| The bucket that is open at the end has to be in the plan as well, unless it is empty.
#: hint
#| `offsets` is a running sum over the bucket, in the order of the bucket.
#: end
