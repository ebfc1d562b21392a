"""``dpcore advise``: what to change in a training run, from what it recorded.

    evidence      what a run shows of its steps, the same for dpcore and for torch DDP
    finding       a cause with its evidence, its gain and the line to change
    of_ranks      late ranks, data loading, unequal batches, threads
    of_buckets    tiny, giant and late buckets, unused parameters, compiled code
    of_links      a slow link, latency, a GPU that waits for the host
    of_local      local updates that wait for what they send
    of_schedules  another launch schedule, by the simulator
    advice        all findings, the one with most to gain first
    own_model     records steps of ``my.py:make``
    command       ``dpcore advise``

A cause is a pure function of the evidence, and returns nothing if it has not been seen: a run in
which nothing is wrong gets "Nothing to gain here."
"""
