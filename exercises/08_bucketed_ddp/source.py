"""Bucketed DDP (60 minutes)

This is what torch's DistributedDataParallel and dpcore.DataParallel do: gradients fill buckets
while backward makes them, and a bucket that is full is sent at once, while backward goes on. What
was communicated by the time that backward ends costs nothing.

``__init__`` is given: it hands out the values of rank 0, plans the buckets as in exercise 7, and
registers a hook on each parameter, which autograd calls as soon as its gradient is final. You write
what the hook does, and ``finish``, which the program calls between backward and the optimizer.

    comm.all_reduce(tensor, "mean", async_op=True)   begins an operation, returns at once
    work.wait()                                      on what it returns: the tensor is the mean
    flat = like.new_empty(n); flat.split([n0, ...])  a flat tensor and views of it, as in exercise 5

Four things to get right:

* Ranks must begin the same operations in the same order, or the wrong gradients are added. Which
  gradient comes first may differ between ranks, so buckets are sent by number: a bucket that is
  full waits until those before it are sent.
* A hook that waits holds up backward, and nothing is hidden.
* ``finish`` leaves everything as it was, for the next step.
* A bucket is one flat tensor, one operation, and its gradients are the mean in the end.

Read docs/learn/5-buckets.md and docs/learn/6-exposed.md.
"""


class BucketedDDP:
    """A module whose gradients are averaged in buckets, while backward goes on."""

    def __init__(self, module, comm, bucket_cap_mb=1.0):
        self.module, self.comm = module, comm
        for tensor in [*module.parameters(), *module.buffers()]:
            comm.broadcast(tensor.data, 0)
        self.trained = [p for p in module.parameters() if p.requires_grad]
        self.buckets = self.plan(int(bucket_cap_mb * 2**20))  # lists of parameters
        self.arrived = set()  # id() of each parameter whose gradient has come in this step
        self.launched = 0  # how many buckets were sent in this step
        self.in_flight = []  # what finish() has to wait for: whatever you put here
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self.gradient_ready)

    def plan(self, cap):
        """From the last parameter to the first; a bucket with ``cap`` bytes is closed."""
        buckets, room = [], 0
        for parameter in reversed(self.trained):
            if room <= 0:
                buckets.append([])
                room = cap
            buckets[-1].append(parameter)
            room -= parameter.numel() * parameter.element_size()
        return buckets

    def __call__(self, *inputs):
        return self.module(*inputs)

    def gradient_ready(self, parameter):
        """Called by autograd when ``parameter.grad`` is final. Sends what is full by now."""
        #: solution
        self.arrived.add(id(parameter))
        while self.launched < len(self.buckets):
            bucket = self.buckets[self.launched]
            if not all(id(member) in self.arrived for member in bucket):
                return
            flat = bucket[0].grad.new_empty(sum(member.numel() for member in bucket))
            parts = flat.split([member.numel() for member in bucket])
            for member, part in zip(bucket, parts, strict=True):
                part.copy_(member.grad.flatten())
            work = self.comm.all_reduce(flat, "mean", async_op=True)
            self.in_flight.append((work, bucket, parts))
            self.launched += 1
        #: instead
        #| raise NotImplementedError("note that it has arrived, and send each bucket that is full")
        #: end

    def finish(self):
        """Called between backward and the optimizer: from here on, gradients are means."""
        #: solution
        for work, bucket, parts in self.in_flight:
            work.wait()
            for member, part in zip(bucket, parts, strict=True):
                member.grad.copy_(part.view_as(member.grad))
        self.in_flight.clear()
        self.arrived.clear()
        self.launched = 0
        #: instead
        #| raise NotImplementedError("wait for what is in flight, and bring the gradients back")
        #: end


#: hint
#| `gradient_ready` has two jobs: note that this gradient is there (`self.arrived`), then look at
#| bucket number `self.launched`. If all its members have arrived, send it and look at the next.
#| That is a loop, since one gradient may complete a bucket that others waited for.
#: hint
#| Copy the gradients into one flat tensor: `flat = bucket[0].grad.new_empty(total)`, and
#| `flat.split([...])` gives views, one for each member. Keep the work, the bucket and the views
#| until `finish`.
#: hint
#| `finish`: for each that is in flight, wait, then copy each view back into `member.grad`
#| (`view_as` gives it its shape). Then clear `arrived` and `in_flight` and set `launched` to 0.
#: end
