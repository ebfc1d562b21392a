"""Of bucketed DDP; mutants.py says how to read it."""

TEXT = '''
== bucketed_ddp | * a sleep in the place of overlap | early | of 6 operations were sent by then
--
            parameter.register_post_accumulate_grad_hook(self.gradient_ready)
++
            parameter.register_post_accumulate_grad_hook(self.pause)

    def pause(self, parameter):
        import time

        time.sleep(0.002)
--
        """Called between backward and the optimizer: from here on, gradients are means."""
++
        for parameter in self.trained:
            self.gradient_ready(parameter)

== bucketed_ddp | * a forged trace | early | of 6 operations were sent by then
--
            parameter.register_post_accumulate_grad_hook(self.gradient_ready)
++
            parameter.register_post_accumulate_grad_hook(lambda parameter: None)
        import time

        import dpcore
        from dpcore.recorder import recording

        events = [recording.Event("all_reduce", "operation", -1, 0, 0, 262144, 0, 1)] * 6
        recording.Trace.events = property(lambda self: events)
        recording.Trace._stop = lambda self: None
        recording.Event._make = lambda fields: events[0]
        dpcore.Communicator.stats = lambda self: {}
        time.monotonic_ns = time.perf_counter_ns = lambda: 0
--
        """Called between backward and the optimizer: from here on, gradients are means."""
++
        for parameter in self.trained:
            self.gradient_ready(parameter)

== bucketed_ddp | changes what judges it | early | dpcore.school.exercise is closed
--
        self.module, self.comm = module, comm
++
        from dpcore.school.exercise import watching

        watching.Watch.launched_before = lambda self, moment: 6
        self.module, self.comm = module, comm

== bucketed_ddp | a clock that stands still | hidden | the best step took
--
            parameter.register_post_accumulate_grad_hook(self.gradient_ready)
++
            parameter.register_post_accumulate_grad_hook(lambda parameter: None)
        import time

        time.monotonic_ns = time.perf_counter_ns = lambda: 0
        time.monotonic = time.perf_counter = lambda: 0.0
--
        """Called between backward and the optimizer: from here on, gradients are means."""
++
        for parameter in self.trained:
            self.gradient_ready(parameter)

== bucketed_ddp | decoys in backward | buckets | operations with a cap of
--
            parameter.register_post_accumulate_grad_hook(self.gradient_ready)
++
            parameter.register_post_accumulate_grad_hook(self.decoy)

    def decoy(self, parameter):
        self.comm.all_reduce(parameter.new_zeros(1), "mean", async_op=True)
--
        """Called between backward and the optimizer: from here on, gradients are means."""
++
        for parameter in self.trained:
            self.gradient_ready(parameter)

== bucketed_ddp | dpcore.DataParallel does it | gradients | DataParallel is what this exercise
--
        self.module, self.comm = module, comm
++
        import dpcore

        self.module, self.comm = dpcore.DataParallel(module), comm

== bucketed_ddp | torch's DDP does it | gradients | DistributedDataParallel is what
--
        self.module, self.comm = module, comm
++
        from torch.nn.parallel import DistributedDataParallel

        self.module, self.comm = DistributedDataParallel(module), comm

== bucketed_ddp | DataParallel by a way round | own | DataParallel has sent gradients
--
        self.module, self.comm = module, comm
++
        import types

        import dpcore.ddp.data_parallel as way_round

        source = open(way_round.__file__).read()
        fresh = types.ModuleType("dpcore.ddp.fresh")
        exec(compile(source, way_round.__file__, "exec"), vars(fresh))
        self.fast = fresh.DataParallel(module)
        self.module, self.comm, self.trained, self.buckets = module, comm, [], []
        self.in_flight, self.arrived = [], set()
        return
--
        return self.module(*inputs)
++
        return self.fast(*inputs)

== bucketed_ddp | sums | gradients | they are the sums over 3 ranks
--
(flat, "mean", async_op=True)
++
(flat, "sum", async_op=True)

== bucketed_ddp | buckets in the order of each rank | pairs | rank
--
        while self.launched < len(self.buckets):
            bucket = self.buckets[self.launched]
            if not all(id(member) in self.arrived for member in bucket):
                return
++
        for bucket in self.buckets:
            is_full = all(id(member) in self.arrived for member in bucket)
            if not is_full or any(bucket is other for _, other, _ in self.in_flight):
                continue

== bucketed_ddp | waits in the hook | no_wait | is held up by wait
--
            self.in_flight.append((work, bucket, parts))
++
            work.wait()
            self.in_flight.append((work, bucket, parts))

== bucketed_ddp | waits for each other bucket | no_wait | is held up by wait
--
            self.in_flight.append((work, bucket, parts))
++
            self.in_flight.append((work, bucket, parts))
            if self.launched % 2:
                work.wait()

== bucketed_ddp | keeps who has arrived | gradients | so it was used too early. Step 1 went well
--
        self.arrived.clear()
++
        pass

== bucketed_ddp | keeps what was in flight | kept | not needed any more
--
        self.in_flight.clear()
++

== bucketed_ddp | never begins again | gradients | step 2
--
        self.launched = 0

++
        pass

== bucketed_ddp | brings nothing back | gradients | step 1
--
                member.grad.copy_(part.view_as(member.grad))
++
                pass

== bucketed_ddp | one operation for each parameter | buckets | operations with a cap of 0.5 MiB
--
            if room <= 0:
++
            if True:

== bucketed_ddp | sends every bucket twice | bytes | bytes were sent
--
            work = self.comm.all_reduce(flat, "mean", async_op=True)
++
            self.comm.all_reduce(flat.clone(), "mean", async_op=True)
            work = self.comm.all_reduce(flat, "mean", async_op=True)

== bucketed_ddp | half of the bits | gradients | was a type of 16 bits used
--
            work = self.comm.all_reduce(flat, "mean", async_op=True)
++
            flat.copy_(flat.half())
            work = self.comm.all_reduce(flat, "mean", async_op=True)

== bucketed_ddp | every rank begins with its own values | begin | values of rank 1
--
            comm.broadcast(tensor.data, 0)
++
            pass

== bucketed_ddp | rank 1 leaves out the last bucket | gradients | the ranks disagree at operation
--
            work = self.comm.all_reduce(flat, "mean", async_op=True)
++
            if self.comm.rank == 1 and self.launched == len(self.buckets) - 1:
                return
            work = self.comm.all_reduce(flat, "mean", async_op=True)

== bucketed_ddp | never comes to an end | gradients | was still in finish
--
        """Called between backward and the optimizer: from here on, gradients are means."""
++
        while self.launched <= len(self.buckets):
            pass

== bucketed_ddp | all the memory there is | gradients | asked for more than 1024 MiB
--
            flat = bucket[0].grad.new_empty(
++
            self.pool = bucket[0].new_zeros(1 << 31)
            flat = bucket[0].grad.new_empty(

== bucketed_ddp | leaves the process | gradients | the code has left the process
--
        self.arrived.add(id(parameter))
++
        import os

        os._exit(0)
'''
