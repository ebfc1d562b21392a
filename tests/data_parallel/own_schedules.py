"""Schedules in Python that leave buckets in flight at the end of backward.

They launch with ``background=False``: nobody drives a bucket until somebody waits for it. The rank
that launches first then has its own numbers until it waits, for certain and not by luck.
"""

import dpcore


class OnlyLaunches(dpcore.LaunchSchedule):
    """Waits nowhere."""

    def bucket_ready(self, control, bucket):
        control.launch(bucket, background=False)


class WaitsAtTheOptimizer(OnlyLaunches):
    def optimizer_step(self, control):
        control.wait_for_all()


class WaitsForOneBucketAtTheOptimizer(OnlyLaunches):
    def optimizer_step(self, control):
        control.wait(0)


class WaitsAtForward(OnlyLaunches):
    """After the optimizer has stepped."""

    def forward_begin(self, control, module):
        for gradient in control.gradients_of_module(module):
            control.wait(control.bucket_of(gradient))


LEAVING = (OnlyLaunches, WaitsAtTheOptimizer, WaitsForOneBucketAtTheOptimizer)
