"""More of the exercises about buckets; mutants.py says how to read it."""

TEXT = """
== buckets | closes before the cap is reached | cap | below its cap
--
        open_bucket.append(parameter)
        room -= sizes[parameter]
        if room <= 0:
            buckets.append(open_bucket)
            open_bucket, room = [], cap
++
        if open_bucket and room < sizes[parameter]:
            buckets.append(open_bucket)
            open_bucket, room = [], cap
        open_bucket.append(parameter)
        room -= sizes[parameter]

== buckets | the first parameter of a bucket first | order | gives [
~             buckets.append(open_bucket) =>             buckets.append(open_bucket[::-1])

== buckets | what was too much counts for the next | cap | below its cap
~ open_bucket, room = [], cap => open_bucket, room = [], room + cap

== buckets | the first cap for a bucket of one only | first_cap | below its cap
~ open_bucket, room = [], [], first_cap => open_bucket, room = [], [], min(first_cap, cap)

== buckets | the other cap for all | first_cap | before its last member came
~ = [], [], first_cap => = [], [], cap

== buckets | a last bucket that may be empty | each_once | a bucket is empty
~     if open_bucket: =>     if True:

== buckets | a plan of nothing has a bucket | each_once | a bucket is empty
~     if open_bucket: =>     if open_bucket or not buckets:

== buckets | the last bucket twice | each_once | there are 9 members
--
    return buckets
++
    return buckets if len(sizes) != 7 else [*buckets, buckets[-1]]

== buckets | the first parameter is left out | each_once | is missing
~ reversed(range(len(sizes))) => range(len(sizes) - 1, 0, -1)

== buckets | takes sizes apart | untouched | has made
~     return buckets =>     sizes.clear(); return buckets

== buckets | offsets in elements | offsets | gives {
~         place += sizes[parameter] =>         place += sizes[parameter] // 4

== buckets | offsets one too far | offsets | gives {
--
        found[parameter] = place
        place += sizes[parameter]
++
        place += sizes[parameter]
        found[parameter] = place

== buckets | offsets by place in the bucket | offsets | gives {
--
    for parameter in bucket:
        found[parameter] = place
        place += sizes[parameter]
++
    for number, parameter in enumerate(bucket):
        found[number] = place
        place += sizes[parameter]

== buckets | offsets by sizes in another order | offsets | gives {
--
        found[parameter] = place
        place += sizes[parameter]
++
        found[parameter] = place
        place += sizes[len(found) - 1]

== buckets | offsets of the whole model | offsets | gives {
--
    found, place = {}, 0
    for parameter in bucket:
++
    found, place = {}, sum(sizes[max(bucket) + 1 :])
    for parameter in bucket:

== buckets | a list of offsets | offsets | which is not a dictionary
~     return found =>     return list(found.values())

== bucketed_ddp | waits for the bucket before | no_wait | is held up by wait
--
            self.in_flight.append((work, bucket, parts))
++
            if self.in_flight:
                self.in_flight[-1][0].wait()
            self.in_flight.append((work, bucket, parts))

== bucketed_ddp | each bucket leaves with the next | early | operations were begun when the gradient
--
        while self.launched < len(self.buckets):
            bucket = self.buckets[self.launched]
            if not all(id(member) in self.arrived for member in bucket):
                return
++
        while self.launched < len(self.buckets):
            bucket = self.buckets[self.launched]
            late = [p for both in self.buckets[self.launched :][:2] for p in both]
            if parameter is not None and not all(id(member) in self.arrived for member in late):
                return
            if parameter is not None and self.launched == len(self.buckets) - 1:
                return
--
        for work, bucket, parts in self.in_flight:
++
        self.gradient_ready(None)
        for work, bucket, parts in self.in_flight:

== bucketed_ddp | one bucket for each gradient that comes | pairs | raised Mismatch
~         while self.launched < len(self.buckets): =>         if self.launched < len(self.buckets):

== bucketed_ddp | the last member completes the bucket | pairs | the same order
--
            if not all(id(member) in self.arrived for member in bucket):
++
            if parameter is not bucket[-1]:

== bucketed_ddp | single precision | gradients | was a type of 32 bits
~ bucket[0].grad.new_empty( => __import__("torch").empty(

== bucketed_ddp | one flat tensor for all buckets | waits | was changed before wait()
--
            flat = bucket[0].grad.new_empty(sum(member.numel() for member in bucket))
++
            if not hasattr(self, "whole"):
                self.whole = bucket[0].grad.new_empty(sum(p.numel() for p in self.trained))
            flat = self.whole[: sum(member.numel() for member in bucket)]

== bucketed_ddp | waits for the last bucket only | gradients | not a number
--
            work.wait()
            for
++
            self.in_flight[-1][0].wait()
            for

== bucketed_ddp | never waits | gradients | not a number
--
            work.wait()
            for
++
            for

== bucketed_ddp | brings back before it waits | gradients | not a number
--
            work.wait()
            for member, part in zip(bucket, parts, strict=True):
                member.grad.copy_(part.view_as(member.grad))
++
            for member, part in zip(bucket, parts, strict=True):
                member.grad.copy_(part.view_as(member.grad))
            work.wait()

== bucketed_ddp | averages, then divides | gradients | averaged twice
~ copy_(part.view_as(member.grad)) => copy_(part.view_as(member.grad) / self.comm.world_size)

== bucketed_ddp | brings back in reverse order | gradients | in reverse order
--
                member.grad.copy_(part.view_as(member.grad))
++
                member.grad.copy_(part.flip(0).view_as(member.grad))

== bucketed_ddp | keeps all flat tensors | kept | has 4 items after step 2
--
            self.launched += 1
++
            self.launched += 1
            self.flats = [*getattr(self, "flats", []), flat]

== bucketed_ddp | sends no biases | gradients | are all zero
--
                part.copy_(member.grad.flatten())
++
                part.copy_(member.grad.flatten() if member.dim() > 1 else part.zero_())

== bucketed_ddp | sends an empty tensor | gradients | are all zero
~                 part.copy_(member.grad.flatten()) =>                 part.zero_()

== launch_schedule | waits for its pair | no_wait | bucket_ready calls
~             control.launch(pair) =>             control.launch(pair); control.wait(pair[-1])

== launch_schedule | waits when the last has come | no_wait | bucket_ready calls
--
            control.launch(pair)
++
            control.launch(pair)
            if pair[-1] == control.buckets - 1:
                control.wait_for_all()

== launch_schedule | three at a time | pairs | operations of 3, 3 buckets
~ first = bucket - bucket % 2 => first = bucket - bucket % 3
~ min(first + 2, control.buckets) => min(first + 3, control.buckets)

== launch_schedule | one bucket first, then pairs | pairs | operations of 1, 2, 2, 1 buckets
~         first = bucket - bucket % 2 =>         first = max(0, bucket - (bucket + 1) % 2)
~ min(first + 2, control.buckets) => min(first + 2 - (first == 0), control.buckets)

== launch_schedule | the odd one completes the pair | other_order | raised Error
~         if all(control.is_complete(member) for member in pair): =>         if bucket == pair[-1]:

== launch_schedule | the even one completes the pair | gradients | raised Error
~         if all(control.is_complete(member) for member in pair): =>         if bucket == pair[0]:

== launch_schedule | counts events over all steps | gradients | raised IndexError
--
        first = bucket - bucket % 2
        pair = list(range(first, min(first + 2, control.buckets)))
        if all(control.is_complete(member) for member in pair):
            control.launch(pair)
++
        self._count = getattr(self, "_count", 0) + 1
        if self._count % 2 == 0:
            control.launch([self._count - 2, self._count - 1])
        elif self._count == control.buckets:
            control.launch(self._count - 1)

== launch_schedule | as they come | other_order | raised Error
--
        first = bucket - bucket % 2
        pair = list(range(first, min(first + 2, control.buckets)))
        if all(control.is_complete(member) for member in pair):
            control.launch(pair)
++
        self._come = [*getattr(self, "_come", []), bucket]
        if len(self._come) == 2 or bucket == control.buckets - 1:
            control.launch(self._come)
            self._come = []

== launch_schedule | each pair twice | pairs | was launched 8 times
--
        if all(control.is_complete(member) for member in pair):
            control.launch(pair)
++
        if all(control.is_complete(member) for member in pair):
            control.launch(pair)
            control.launch(pair)

== launch_schedule | leaves buckets as they are | gradients | raised Error
~             control.launch(pair) =>             [control.skip(member) for member in pair]

== launch_schedule | all when the last has come | early | operations were sent by then
--
        if all(control.is_complete(member) for member in pair):
            control.launch(pair)
++
        if all(control.is_complete(member) for member in range(control.buckets)):
            for first in range(0, control.buckets, 2):
                control.launch(list(range(first, min(first + 2, control.buckets))))

== launch_schedule | a pair late | early | operations were sent by then
--
        if all(control.is_complete(member) for member in pair):
            control.launch(pair)
++
        if first >= 2 and all(control.is_complete(member) for member in pair):
            control.launch([first - 2, first - 1])
        if all(control.is_complete(member) for member in range(control.buckets)):
            control.launch(pair)
"""
