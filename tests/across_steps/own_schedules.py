"""The schedules once more, as a user would write them in Python.

They launch with ``background=False``: nobody drives a bucket until somebody waits for it, so a wait
that is missing is a stale value for certain, and not by luck.
"""

import dpcore


class Priority(dpcore.LaunchSchedule):
    def phases(self):
        return ["all_reduce", "update"]

    def bucket_ready(self, control, bucket):
        control.launch(bucket, priority=bucket, background=False)

    def forward_begin(self, control, module):
        for bucket in self._needed_by(control, module):
            control.wait(bucket)
            control.update(bucket)

    def _needed_by(self, control, module):
        return [control.bucket_of(gradient) for gradient in control.gradients_of_module(module)]


class Dear(Priority):
    def phases(self):
        return ["reduce_scatter", "all_gather", "update"]

    def backward_end(self, control):
        for bucket in control.order_of_need():
            control.wait(bucket)
            control.launch(bucket, background=False)


class DearAtOnce(Dear):
    """Each gather is launched behind its reduce_scatter, which nobody waits for."""

    def backward_end(self, control):
        for bucket in range(control.buckets):
            control.launch(bucket, background=False)


class Zero1(Priority):
    def phases(self):
        return ["reduce_scatter", "update", "all_gather"]

    def optimizer_step(self, control):
        for bucket in range(control.buckets):
            control.wait(bucket)
            control.update(bucket)
            control.launch(bucket, background=False)


OWN = (Priority, Dear, DearAtOnce, Zero1)
